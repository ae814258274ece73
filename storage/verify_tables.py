"""Reading what a run has stored as someone who does not trust it: what is wrong becomes a fault, with file and fix."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from milepost.storage import files, purges
from milepost.storage.schema import ROLLOUTS, SCHEMAS, migrate, schema_name
from milepost.storage.schema_versions import NewerTable, SchemaMismatch
from milepost.storage.tables import TableRef

RESTORE = "restore it from a copy of the run"
WRITTEN_SO = "the file is as it was written, so what wrote it was wrong: use nothing from this step on"


@dataclass(frozen=True)
class Fault:
    """One thing that is not as it must be."""

    file: str
    problem: str
    fix: str


@dataclass(frozen=True)
class Stack:
    """Tables of one kind under one another; `parts` are their files and row counts, in order."""

    table: pa.Table
    parts: list[tuple[str, int]]

    def file_of(self, row: int) -> str:
        for uri, rows in self.parts:
            if row < rows:
                return uri
            row -= rows
        raise IndexError(row)

    def each(self) -> Iterator[tuple[str, pa.Table]]:
        """Every file and its rows."""
        begin = 0
        for uri, rows in self.parts:
            yield uri, self.table.slice(begin, rows)
            begin += rows

    def flagged(self, mask: Any, what: str) -> list[Fault]:
        """One fault when any row is true or null in `mask`; it names the first, and says how many there are."""
        flags = pc.fill_null(mask, True)
        if not pc.any(flags).as_py():
            return []
        rows = [row for row, flag in enumerate(flags.to_pylist()) if flag]
        more = f" (and {len(rows) - 1} more)" if len(rows) > 1 else ""
        sample = self.table["sample_id"][rows[0]].as_py()
        return [Fault(self.file_of(rows[0]), f"sample {sample} {what}{more}", WRITTEN_SO)]


def stack(parts: Sequence[tuple[str, pa.Table]]) -> Stack:
    table = pa.concat_tables([table for _, table in parts]) if parts else ROLLOUTS.empty_table()
    return Stack(table.combine_chunks(), [(uri, found.num_rows) for uri, found in parts])


def base_name(uri: str) -> str:
    return uri.rstrip("/").rsplit("/", 1)[-1]


def load_json(uri: str) -> dict[str, Any] | Fault:
    """The JSON object at `uri`."""
    try:
        content = files.read_json(uri)
    except FileNotFoundError:
        return Fault(uri, "is missing", RESTORE)
    except ValueError:
        return Fault(uri, "is not JSON", RESTORE)
    if not isinstance(content, dict):
        return Fault(uri, f"holds a {type(content).__name__}, an object was written", RESTORE)
    return content


def load_table(uri: str, ref: TableRef) -> pa.Table | Fault:
    """The table at `uri` when its digest, its pages, its schema and its rows are those of `ref`."""
    try:
        data = files.read(uri)
    except FileNotFoundError:
        return Fault(uri, f"is missing; {ref.rows} rows of {ref.schema} were stored in it", RESTORE)
    found = files.digest_of(data)
    if found != ref.digest and not purges.explains(uri, ref.digest, found):
        return Fault(uri, f"has digest {found[:12]}, {ref.digest[:12]} was written", RESTORE)
    try:
        table = _decode(data)
        name = schema_name(table.schema)
    except NewerTable as error:
        return Fault(uri, str(error).partition(":")[0], error.fix)
    except (SchemaMismatch, pa.ArrowException, OSError) as error:
        return Fault(uri, f"cannot be read: {error}", WRITTEN_SO)
    if (name, table.num_rows) != (ref.schema, ref.rows):
        stored = f"{table.num_rows} rows of {name}"
        return Fault(uri, f"holds {stored}, its commit says {ref.rows} rows of {ref.schema}", WRITTEN_SO)
    return table


def _decode(data: bytes) -> pa.Table:
    """The table in the newest schema; one that was written in it is checked without a copy."""
    table = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True).read(use_threads=False)
    schema = SCHEMAS[schema_name(table.schema)]
    if table.schema.metadata != schema.metadata or not table.schema.equals(schema):
        return migrate(table)
    for index, field in enumerate(schema):
        if not field.nullable and table.column(index).null_count:
            raise SchemaMismatch(f"column {field.name!r} holds a null")
    return table
