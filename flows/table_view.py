"""A view of DuckDB over stored tables of one schema, whatever versions of it they were written in."""

from collections.abc import Sequence

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from milepost.storage import files
from milepost.storage.schema_versions import Catalog, NewerTable
from milepost.storage.tables import TableRef


def create_view(
    connection: duckdb.DuckDBPyConnection,
    view: str,
    tables: Sequence[TableRef],
    *,
    schema: str,
    catalog: Catalog,
    filename: bool = False,
) -> None:
    """All rows of `tables` in the newest version of `schema`, with their files in `filename` if asked.

    Older tables have defaults in the columns that were added since; ValueError names a table that is newer.
    """
    for ref in tables:
        _require_known(ref, catalog)
    empty = catalog.schema(schema).empty_table()
    if not tables:
        connection.register(view, empty.append_column("filename", pa.array([], pa.string())) if filename else empty)
        return
    added = catalog.added_since(schema, min(ref.version for ref in tables))
    listed = ", ".join("'" + ref.uri.replace("'", "''") + "'" for ref in tables)
    rows = f"SELECT * FROM read_parquet([{listed}], filename = {filename}, union_by_name = {bool(added)})"
    if added:
        connection.register(f"{view}_columns", empty)
        replaced = _defaults(connection, view, empty.schema, added)
        rows = f"SELECT * {replaced} FROM ({rows} UNION ALL BY NAME FROM {view}_columns)"
    connection.execute(f"CREATE VIEW {view} AS {rows}")


def _require_known(ref: TableRef, catalog: Catalog) -> None:
    if ref.version <= catalog.newest:
        return
    fs, path = files.filesystem(ref.uri)
    with fs.open(path, "rb") as file:
        footer = pq.read_schema(file)
    try:
        catalog.require_known(footer)
    except NewerTable as error:
        raise ValueError(f"{ref.uri} cannot be read: {error}") from None


def _defaults(connection: duckdb.DuckDBPyConnection, view: str, schema: pa.Schema, added: dict[str, object]) -> str:
    """What a query selects instead of columns that older tables lack: a null in them is the default."""
    given = {column: value for column, value in added.items() if value is not None}
    if not given:
        return ""
    row = {column: pa.array([value], schema.field(column).type) for column, value in given.items()}
    connection.register(f"{view}_defaults", pa.table(row))
    replaced = (f"coalesce({column}, (SELECT {column} FROM {view}_defaults)) AS {column}" for column in given)
    return f"REPLACE ({', '.join(replaced)})"
