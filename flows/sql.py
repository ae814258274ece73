"""SQL over the rollouts of a run, by DuckDB, without loading them first."""

from typing import Any

import duckdb

from milepost.storage import files, manifest
from milepost.storage.runs import RunFolder


def rollout_files(folder: RunFolder) -> list[str]:
    """The newest table of every shard of every finished step, in order: each sample once."""
    return [
        entry["tables"]["rollouts"]["uri"]
        for step in manifest.finished_steps(folder)
        for entry in manifest.load(folder, step).commits
        if entry["slot"].startswith("filter-")
    ]


def query(folder: RunFolder, statement: str) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Column names and rows of `statement`, in which `rollouts` is the table of all samples of the run."""
    found = rollout_files(folder)
    if not found:
        raise LookupError(f"run {folder.run_id!r} has no finished step to query")
    connection = duckdb.connect()
    if not files.is_local(folder.uri):
        connection.register_filesystem(files.filesystem(folder.uri)[0])
    listed = ", ".join("'" + uri.replace("'", "''") + "'" for uri in found)
    connection.execute(f"CREATE VIEW rollouts AS SELECT * FROM read_parquet([{listed}], union_by_name = true)")
    try:
        result = connection.execute(statement)
    except duckdb.Error as error:
        raise ValueError(f"DuckDB refused the query: {' '.join(str(error).split())}") from None
    return [column[0] for column in result.description or []], result.fetchall()
