"""The raw rows of a prompt set, file or folder, and `path@[a:b]` slices of it. Nothing is dropped in silence.

Rows are read one by one: a file of any size costs the memory of a few. A JSONL row ends at a newline byte and nowhere
else; what JSON does not allow (NaN, a key twice) is a bad line.
"""

import gzip
import importlib
import io
import json
import re
import sys
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from milepost.storage import files
from milepost.storage.registry import nearest
from milepost.storage.strict_json import parse_json

EXTENSIONS = (".jsonl", ".jsonl.gz", ".parquet")

_SLICE = re.compile(r"\s*([+-]?\d+)?\s*:\s*([+-]?\d+)?\s*")
_BOM = b"\xef\xbb\xbf"
ROWS = 4096  # in memory as objects at a time
_BATCH = 1024
_SAVED = "dataset_info.json"  # in a folder that `datasets` has saved
_SAVED_SPLITS = "dataset_dict.json"


@dataclass(frozen=True)
class RawRow:
    """One row as found. `row` counts the rows of the whole file from 0, `line` its lines (Parquet: rows) from 1."""

    row: int
    line: int
    value: dict[str, Any]


@dataclass(frozen=True)
class BadLine:
    """A row that cannot be used, why, and its text as far as text can show it. `row` and `line` as in RawRow."""

    row: int
    line: int
    reason: str
    text: str

    @property
    def place(self) -> str:
        return f"line {self.line} (row {self.row})"


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
    """The rows of the set at `path`, in its order. ValueError when there is no such set or it has no such rows."""
    uri, wanted = parse_path(path)
    _require_set(uri)
    if not uri.endswith(EXTENSIONS):
        return _dataset_rows(uri, wanted)
    return _parquet_rows(uri, wanted) if uri.endswith(".parquet") else _jsonl_rows(uri, wanted)


def read_batches(path: str) -> Iterator[list[RawRow | BadLine]]:
    """The rows of the set at `path`, some thousands at a time."""
    rows = read_rows(path)
    while batch := list(islice(rows, ROWS)):
        yield batch


def _require_set(uri: str) -> None:
    if not uri:
        raise ValueError("data.path is empty: give a prompt set, a .jsonl, .jsonl.gz or .parquet file")
    fs, path = files.filesystem(uri)
    if fs.isdir(path):
        _require_saved(uri)
    elif not uri.endswith(EXTENSIONS):
        raise ValueError(f"data.path {uri!r} must end in one of {', '.join(EXTENSIONS)}")
    elif not fs.exists(path):
        name = path.rpartition("/")[2]
        raise ValueError(f"data.path {uri!r} does not exist{nearest(name, files.names(uri.removesuffix(name) or '.'))}")


def _require_saved(uri: str) -> None:
    """ValueError unless a folder is one data set, saved by the library `datasets`."""
    found = files.names(uri)
    if _SAVED_SPLITS in found:
        splits = [name for name in found if files.exists(files.join(uri, name, _SAVED))]
        raise ValueError(f"data.path {uri!r} holds the splits {splits}: give one, such as {files.join(uri, splits[0])}")
    if _SAVED not in found or uri.endswith(EXTENSIONS):
        raise ValueError(
            f"data.path {uri!r} is a folder and no data set that `datasets` has saved: give one file of it"
        )


def _select(uri: str, count: int, wanted: slice) -> range:
    if count == 0:
        raise _no_rows(uri)
    rows = range(count)[wanted]
    if not rows:
        start, stop = ("" if bound is None else bound for bound in (wanted.start, wanted.stop))
        raise ValueError(f"{uri}@[{start}:{stop}] selects none of the {count} rows")
    return rows


def _no_rows(uri: str) -> ValueError:
    return ValueError(f"{uri} holds no rows: give a prompt set with at least one")


def _dataset_rows(uri: str, wanted: slice) -> Iterator[RawRow | BadLine]:
    try:
        library = importlib.import_module("datasets")
    except ImportError:
        raise ValueError(
            f"data.path {uri!r} was saved by `datasets`, which is not installed: pip install 'milepost[datasets]', or "
            "write it as Parquet where it is"
        ) from None
    try:
        found = library.load_from_disk(uri)
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{uri} is not a sound data set: {error}") from None
    rows = _select(uri, len(found), wanted)
    yield from _batch_rows(uri, found.with_format("arrow").iter(_BATCH), rows)


def _parquet_rows(uri: str, wanted: slice) -> Iterator[RawRow | BadLine]:
    fs, path = files.filesystem(uri)
    try:
        with fs.open(path, "rb") as opened, pq.ParquetFile(opened, page_checksum_verification=True) as file:
            rows = _select(uri, file.metadata.num_rows, wanted)
            yield from _batch_rows(uri, file.iter_batches(_BATCH), rows)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{uri} is not a sound Parquet file: {error}") from None


def _batch_rows(uri: str, batches: Iterator[pa.RecordBatch], rows: range) -> Iterator[RawRow | BadLine]:
    """Those of the `rows` in the batches of a whole set."""
    start = 0
    for batch in batches:
        twice = next((name for name in batch.schema.names if batch.schema.names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"{uri} has two columns called {twice!r}: rename one")
        first, stop = max(rows.start, start), min(rows.stop, start + batch.num_rows)
        if first < stop:
            yield from _values(batch.slice(first - start, stop - first), first)
        start += batch.num_rows
        if start >= rows.stop:
            return


def _values(batch: pa.RecordBatch, first: int) -> Iterator[RawRow | BadLine]:
    try:
        for row, value in enumerate(batch.to_pylist(maps_as_pydicts="strict"), first):
            yield RawRow(row, row + 1, value)
    except KeyError as error:  # a map with a key twice
        if batch.num_rows == 1:
            yield BadLine(first, first + 1, str(error.args[0]), str(batch.to_pylist()[0]))
            return
        for place in range(batch.num_rows):
            yield from _values(batch.slice(place, 1), first + place)


def _jsonl_rows(uri: str, wanted: slice) -> Iterator[RawRow | BadLine]:
    rows = range(sys.maxsize)
    if wanted != slice(None):
        rows = _select(uri, sum(1 for _ in _lines(uri)), wanted)
    row = -1
    for row, (line, data) in enumerate(_lines(uri)):
        if row >= rows.stop:
            return
        if row >= rows.start:
            yield parse_line(row, line, data)
    if row < 0:
        raise _no_rows(uri)


def _lines(uri: str) -> Iterator[tuple[int, bytes]]:
    """The lines of a file that are not blank, numbered from 1."""
    with _opened(uri) as file:
        try:
            for number, line in enumerate(file, start=1):
                data = (line.removeprefix(_BOM) if number == 1 else line).removesuffix(b"\n")
                if data and not data.isspace():
                    yield number, data
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"{uri} is not a whole gzip file: {error}") from None


@contextmanager
def _opened(uri: str) -> Iterator[Iterable[bytes]]:
    """A file to read line by line, unzipped."""
    fs, path = files.filesystem(uri)
    with fs.open(path, "rb") as raw, io.BufferedReader(raw) as file:
        if not uri.endswith(".gz"):
            yield file
            return
        with gzip.open(file) as unzipped:
            yield unzipped


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
    return BadLine(row, line, reason, data.decode(errors="backslashreplace"))
