"""The raw rows of a prompt file, JSONL or Parquet, and `path@[a:b]` slices of it. Nothing is dropped in silence.

A JSONL row ends at a newline byte and nowhere else; what JSON does not allow (NaN, a key twice) is a bad line.
"""

import gzip
import io
import json
import math
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from milepost.storage import files
from milepost.storage.registry import nearest

EXTENSIONS = (".jsonl", ".jsonl.gz", ".parquet")

_SLICE = re.compile(r"\s*([+-]?\d+)?\s*:\s*([+-]?\d+)?\s*")
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class RawRow:
    """One row as found. `row` counts the rows of the whole file from 0, `line` its lines (Parquet: rows) from 1."""

    row: int
    line: int
    value: dict[str, Any]


@dataclass(frozen=True)
class BadLine:
    """A row that cannot be used, why, and its text as far as text can show it."""

    line: int
    reason: str
    text: str


def parse_path(path: str) -> tuple[str, slice]:
    """`uri` and the rows wanted of `uri` or `uri@[start:stop]`, with Python's meaning of start and stop."""
    if not path.endswith("]") and "@[" not in path:
        return path, slice(None)
    uri, _, inside = path.rpartition("@[")
    found = _SLICE.fullmatch(inside[:-1]) if inside.endswith("]") else None
    if not uri or found is None:
        raise ValueError(
            f"data.path {path!r} has no slice of the form '@[start:stop]', such as '@[:1000]' or '@[-100:]'"
        )
    start, stop = (None if text is None else int(text) for text in found.groups())
    return uri, slice(start, stop)


def read_rows(path: str) -> Iterator[RawRow | BadLine]:
    """The rows of the file at `path`, in its order. ValueError when there is no such file or it has no such rows."""
    uri, wanted = parse_path(path)
    _require_file(uri)
    data = files.read(uri)
    if uri.endswith(".parquet"):
        return _parquet_rows(uri, data, wanted)
    return _jsonl_rows(uri, _unzip(uri, data) if uri.endswith(".gz") else data, wanted)


def _require_file(uri: str) -> None:
    if not uri:
        raise ValueError("data.path is empty: give a prompt set, a .jsonl, .jsonl.gz or .parquet file")
    if not uri.endswith(EXTENSIONS):
        raise ValueError(f"data.path {uri!r} must end in one of {', '.join(EXTENSIONS)}")
    fs, path = files.filesystem(uri)
    if fs.isdir(path):
        raise ValueError(f"data.path {uri!r} is a folder: give one file of it")
    if not fs.exists(path):
        name = path.rpartition("/")[2]
        raise ValueError(f"data.path {uri!r} does not exist{nearest(name, files.names(uri.removesuffix(name) or '.'))}")


def _unzip(uri: str, data: bytes) -> bytes:
    try:
        return gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{uri} is not a whole gzip file: {error}") from None


def _select(uri: str, count: int, wanted: slice) -> range:
    if count == 0:
        raise ValueError(f"{uri} holds no rows: give a prompt set with at least one")
    rows = range(count)[wanted]
    if not rows:
        start, stop = ("" if bound is None else bound for bound in (wanted.start, wanted.stop))
        raise ValueError(f"{uri}@[{start}:{stop}] selects none of the {count} rows")
    return rows


def _parquet_rows(uri: str, data: bytes, wanted: slice) -> Iterator[RawRow | BadLine]:
    try:
        table = pq.read_table(io.BytesIO(data), page_checksum_verification=True)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{uri} is not a sound Parquet file: {error}") from None
    rows = _select(uri, table.num_rows, wanted)
    values = table.slice(rows.start, len(rows)).to_pylist(maps_as_pydicts="strict")
    return (RawRow(row, row + 1, value) for row, value in zip(rows, values, strict=True))


def _jsonl_rows(uri: str, data: bytes, wanted: slice) -> Iterator[RawRow | BadLine]:
    lines = data.removeprefix(_BOM).split(b"\n")
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if not line.isspace() and line]
    rows = _select(uri, len(numbered), wanted)
    return (parse_line(row, *numbered[row]) for row in rows)


def parse_line(row: int, line: int, data: bytes) -> RawRow | BadLine:
    try:
        value = parse_json(data.decode(errors="surrogatepass"))
    except UnicodeDecodeError as error:
        reason = f"not UTF-8 at byte {error.start}"
    except json.JSONDecodeError as error:
        reason = f"not JSON: {error.msg} at column {error.colno}"
    except RecursionError:
        reason = "nested too deeply"
    except ValueError as error:
        reason = str(error)
    else:
        if isinstance(value, dict):
            return RawRow(row, line, value)
        reason = f"a {type(value).__name__}, not a JSON object"
    return BadLine(line, reason, data.decode(errors="backslashreplace"))


def parse_json(text: str) -> Any:
    """`text` as JSON, strictly: ValueError for NaN, infinities, numbers that overflow, and a key given twice."""
    return json.loads(text, parse_constant=_no_constant, parse_float=_finite, object_pairs_hook=_unique)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text} is too large")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} is given twice")
    return value
