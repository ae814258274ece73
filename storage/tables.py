"""Parquet tables with a digest: what tasks hand each other is a `TableRef`, never data."""

import io
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from milepost.storage import files, purges
from milepost.storage.schema import CATALOG, SCHEMAS, check, migrate, schema_name
from milepost.storage.schema_versions import Catalog, NewerTable, version_of

ROW_GROUP_SIZE = 256
CHECKS_AT_ONCE = 8
_SPLIT_TYPES = (pa.int32(), pa.float32())


class DamagedTable(ValueError):
    """The bytes of a table are not the bytes that were written."""


@dataclass(frozen=True)
class TableRef:
    """Where a table is, how many rows it has, the SHA-256 of its file, and its schema with the version of it.

    What was stored before there were versions here is of version 1.
    """

    uri: str
    rows: int
    digest: str
    schema: str
    version: int = 1


def _split_columns(schema: pa.Schema) -> list[str]:
    """Leaf paths of the token-id and log-probability columns, the ones byte-stream-split pays for."""
    return [
        f"{field.name}.list.element"
        for field in schema
        if pa.types.is_list(field.type) and field.type.value_type in _SPLIT_TYPES
    ]


def encode(table: pa.Table) -> bytes:
    """A checked table as Parquet bytes; equal tables give equal bytes."""
    split = set(_split_columns(table.schema))
    plain = [name for name in table.column_names if f"{name}.list.element" not in split]
    sink = io.BytesIO()
    pq.write_table(
        table,
        sink,
        row_group_size=ROW_GROUP_SIZE,
        compression="zstd",
        compression_level=3,
        use_dictionary=plain,
        use_byte_stream_split=sorted(split),
        write_page_checksum=True,
    )
    return sink.getvalue()


def write_table(uri: str, table: pa.Table, schema: pa.Schema, catalog: Catalog = CATALOG) -> TableRef:
    """Publish `table` as `<uri>-<digest>.parquet`. Writing the same table twice is the same file."""
    data = encode(check(table, schema))
    digest = files.digest_of(data)
    place = f"{uri}-{digest[:12]}.parquet"
    ref = TableRef(place, table.num_rows, digest, schema_name(schema), version_of(schema))
    try:
        files.publish(ref.uri, data)
    except files.AlreadyPublished:
        read_table(ref, catalog)
    return ref


def read_table(ref: TableRef, catalog: Catalog = CATALOG) -> pa.Table:
    """The table behind `ref`, in the newest schema version; raises DamagedTable unless every byte is as written."""
    data = require(ref)
    try:
        return read_bytes(data, catalog)
    except NewerTable as error:
        raise ValueError(f"{ref.uri} cannot be read: {error}") from None


def require(ref: TableRef) -> bytes:
    """The bytes of a table that is there and as it was written; else FileNotFoundError or DamagedTable names it."""
    try:
        data = files.read(ref.uri)
    except FileNotFoundError:
        message = f"{ref.uri} is missing, {ref.rows} rows were stored in it: restore it from a copy"
        raise FileNotFoundError(message) from None
    found = files.digest_of(data)
    if found != ref.digest and not purges.explains(ref.uri, ref.digest, found):
        raise DamagedTable(f"{ref.uri} has digest {found[:12]}, {ref.digest[:12]} was written: restore it from a copy")
    return data


def require_all(refs: Iterable[TableRef]) -> None:
    """`require` for each of many tables, side by side: hashing leaves the interpreter free."""
    with ThreadPoolExecutor(CHECKS_AT_ONCE) as pool:
        for _ in pool.map(lambda ref: len(require(ref)), refs):
            pass


def read_bytes(data: bytes, catalog: Catalog = CATALOG) -> pa.Table:
    return migrate(pq.ParquetFile(io.BytesIO(data), page_checksum_verification=True).read(), catalog)


def concat(tables: list[pa.Table], schema: pa.Schema) -> pa.Table:
    return pa.concat_tables(tables) if tables else schema.empty_table()


def with_columns(table: pa.Table, columns: dict[str, list[object]]) -> pa.Table:
    """`table` with the named columns replaced, in the types its schema declares."""
    schema = SCHEMAS[schema_name(table.schema)]
    for name, values in columns.items():
        field = schema.field(name)
        table = table.set_column(schema.get_field_index(name), field, pa.array(values, field.type))
    return check(table, schema)
