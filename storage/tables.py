"""Parquet tables with a digest: what tasks hand each other is a `TableRef`, never data."""

import io
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from milepost.storage import files
from milepost.storage.schema import SCHEMAS, check, migrate, schema_name

ROW_GROUP_SIZE = 256
_SPLIT_TYPES = (pa.int32(), pa.float32())


class DamagedTable(ValueError):
    """The bytes of a table are not the bytes that were written."""


@dataclass(frozen=True)
class TableRef:
    """Where a table is, how many rows it has, and the SHA-256 of its file."""

    uri: str
    rows: int
    digest: str
    schema: str


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


def write_table(uri: str, table: pa.Table, schema: pa.Schema) -> TableRef:
    """Publish `table` as `<uri>-<digest>.parquet`. Writing the same table twice is the same file."""
    data = encode(check(table, schema))
    digest = files.digest_of(data)
    ref = TableRef(f"{uri}-{digest[:12]}.parquet", table.num_rows, digest, schema_name(schema))
    try:
        files.publish(ref.uri, data)
    except files.AlreadyPublished:
        read_table(ref)
    return ref


def read_table(ref: TableRef) -> pa.Table:
    """The table behind `ref`, in the newest schema version; raises DamagedTable unless every byte is as written."""
    return read_bytes(require(ref))


def require(ref: TableRef) -> bytes:
    """The bytes of a table that is there and as it was written; else FileNotFoundError or DamagedTable names it."""
    try:
        data = files.read(ref.uri)
    except FileNotFoundError:
        message = f"{ref.uri} is missing, {ref.rows} rows were stored in it: restore it from a copy"
        raise FileNotFoundError(message) from None
    found = files.digest_of(data)
    if found != ref.digest:
        raise DamagedTable(f"{ref.uri} has digest {found[:12]}, {ref.digest[:12]} was written: restore it from a copy")
    return data


def read_bytes(data: bytes) -> pa.Table:
    return migrate(pq.read_table(io.BytesIO(data), page_checksum_verification=True))


def concat(tables: list[pa.Table], schema: pa.Schema) -> pa.Table:
    return pa.concat_tables(tables) if tables else schema.empty_table()


def with_columns(table: pa.Table, columns: dict[str, list[object]]) -> pa.Table:
    """`table` with the named columns replaced, in the types its schema declares."""
    schema = SCHEMAS[schema_name(table.schema)]
    for name, values in columns.items():
        field = schema.field(name)
        table = table.set_column(schema.get_field_index(name), field, pa.array(values, field.type))
    return check(table, schema)
