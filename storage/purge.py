"""Taking prompts out of a stored run: which tables hold them, and those tables again with tombstones in their place."""

import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from milepost.storage import files, purges
from milepost.storage.purges import PurgedTable
from milepost.storage.runs import RunFolder
from milepost.storage.tables import DamagedTable, encode, read_bytes
from milepost.storage.tombstones import TOMBSTONE_JSON, entombed

Words = tuple[str, ...]
"""What a prompt says: its text, or that of its messages."""

_DIGEST_IN_NAME = re.compile(r"-([0-9a-f]{12})\.parquet$")


@dataclass(frozen=True)
class Finding:
    """Which tables of a run still say what the prompts said, as replacements that are yet to be made."""

    prompts: frozenset[str]
    tables: list[PurgedTable]


def table_uris(folder: RunFolder) -> Iterator[str]:
    """Every table of a run, also those that no commit names: of prompt sets, steps and evaluations."""
    for place in _table_folders(folder):
        yield from (files.join(place, name) for name in files.names(place) if name.endswith(".parquet"))


def _table_folders(folder: RunFolder) -> Iterator[str]:
    yield files.join(folder.uri, "prompts")
    for kind in ("steps", "evals"):
        place = files.join(folder.uri, kind)
        yield from (files.join(place, name) for name in files.names(place) if name.isdigit())


def find(folder: RunFolder, prompts: Collection[str]) -> Finding:
    """What a purge of `prompts` has to replace."""
    wanted = frozenset(prompts)
    holding = (uri for uri in table_uris(folder) if not wanted.isdisjoint(_prompt_ids(uri)))
    return Finding(wanted, [table for uri in holding for table in _replacement(uri, wanted)])


def said(folder: RunFolder) -> dict[str, Words]:
    """What each prompt says that a table of the run has, by its id; nothing for one that is purged."""
    found: dict[str, Words] = {}
    for uri in table_uris(folder):
        known = _distinct(uri, ["prompt_id", "prompt"])
        for prompt_id, prompt in zip(*(known[name].to_pylist() for name in known.column_names), strict=True):
            words = () if prompt == TOMBSTONE_JSON else tuple(_texts(json.loads(prompt)))
            found[prompt_id] = words or found.get(prompt_id, ())
    return found


def _prompt_ids(uri: str) -> list[str]:
    ids: list[str] = _distinct(uri, ["prompt_id"])["prompt_id"].to_pylist()
    return ids


def _distinct(uri: str, columns: list[str]) -> pa.Table:
    """What there is in some columns of a table, each once; nothing in a table that has them not."""
    fs, path = files.filesystem(uri)
    with fs.open(path, "rb") as file, pq.ParquetFile(file) as table:
        if not set(columns) <= set(table.schema_arrow.names):
            return pa.table({name: pa.array([], pa.string()) for name in columns})
        return table.read(columns=columns).group_by(columns).aggregate([])


def _replacement(uri: str, prompts: Collection[str]) -> list[PurgedTable]:
    """How a table is to be replaced; nothing when it has been."""
    before, data, rows = _rewritten(uri, prompts)
    after = files.digest_of(data)
    _, file = purges.run_and_file(uri)
    return [PurgedTable(file, rows, before, after)] if after != before else []


def _rewritten(uri: str, prompts: Collection[str]) -> tuple[str, bytes, int]:
    """The digest of a table as it is, its bytes with tombstones, and how many of those there are for `prompts`."""
    data = files.read(uri)
    before = files.digest_of(data)
    named = _DIGEST_IN_NAME.search(uri)
    if named and not before.startswith(named[1]) and not purges.explains(uri, named[1], before):
        raise DamagedTable(f"{uri} has digest {before[:12]}, {named[1]} was written: restore it from a copy")
    table = read_bytes(data)
    rows = pc.sum(pc.is_in(table["prompt_id"], pc.cast(sorted(prompts), "string"))).as_py() or 0
    left = entombed(table, prompts)
    return before, data if left.equals(table) else encode(left), rows


def replace_tables(folder: RunFolder, found: Finding) -> None:
    """Put every table that was found into place with its tombstones, each whole or not at all."""
    for table in found.tables:
        uri = files.join(folder.uri, table.file)
        _, data, _ = _rewritten(uri, found.prompts)
        files.publish(uri, data, overwrite=True)


def leftovers(folder: RunFolder) -> list[str]:
    """Temporary files of writers that were killed, which may hold what a table holds."""
    return [found for place in (folder.uri, *_table_folders(folder)) for found in files.temporary(place)]


def remove_leftovers(folder: RunFolder) -> None:
    for found in leftovers(folder):
        Path(found).unlink()


def words(folder: RunFolder, found: Finding) -> list[list[str]]:
    """What each prompt says, as far as the tables that were found still have it: its text, or that of its messages."""
    prompts: set[str] = set()
    for table in found.tables:
        rows = read_bytes(files.read(files.join(folder.uri, table.file)))
        rows = rows.filter(pc.is_in(rows["prompt_id"], pc.cast(sorted(found.prompts), "string")))
        prompts |= set(rows["prompt"].to_pylist())
    return [texts for prompt in sorted(prompts - {TOMBSTONE_JSON}) if (texts := _texts(json.loads(prompt)))]


def _texts(content: Any) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [message["content"] for message in content if isinstance(message.get("content"), str)]
