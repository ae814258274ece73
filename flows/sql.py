"""SQL over stored runs, by DuckDB, without loading them first.

Tables: `rollouts` (every sample), `prompts` (every serving), `steps` and `metrics` (from the manifests), `verdicts`
(what rewards said), `drops` (samples that were not trained on, with the reason) and `batches` (what the optimizer was
given). Each has `run_id` and `step`.
"""

import fnmatch
import json
from dataclasses import dataclass
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import csv

from milepost.storage import attempts, files, manifest, runs
from milepost.storage.ancestry import tables_of
from milepost.storage.journal import Commit, Slot, StepStore
from milepost.storage.manifest import StepManifest
from milepost.storage.registry import nearest
from milepost.storage.runs import RunFolder
from milepost.storage.schema import PROMPTS, ROLLOUTS
from milepost.storage.touches import run_folders

_PROMPTS = """
CREATE VIEW prompts AS SELECT of.run_id, of.step, served.* EXCLUDE (filename)
FROM served JOIN serving_files AS of USING (filename)
"""
_VERDICTS = """
CREATE VIEW verdicts AS SELECT run_id, step, sample_id, reward AS score,
    verdict ->> '$.reason' AS reason, verdict ->> '$.grader' AS grader, verdict ->> '$.extracted' AS extracted
FROM rollouts WHERE verdict IS NOT NULL
"""
_DROPS = """
CREATE VIEW drops AS SELECT run_id, step, group_id, sample_id, status, reward, drop_reason FROM rollouts WHERE NOT kept
"""


def chosen_runs(root: str, run: str, pattern: str = "") -> list[RunFolder]:
    """The run called `run` and all others of `root` whose names match `pattern`; LookupError when it is not there."""
    folder = runs.run_folder(root, run)
    if not files.exists(folder.record):
        known = [found.run_id for found in run_folders(root)]
        raise LookupError(f"no run {run!r}: {folder.record} does not exist{nearest(run, known)}")
    attempts.current(folder)
    others = [found for found in run_folders(root) if fnmatch.fnmatchcase(found.run_id, pattern)] if pattern else []
    return [folder, *(found for found in others if found.run_id != run)]


@dataclass(frozen=True)
class Committed:
    """What a run has committed: its finished steps, and what there is of the one after them."""

    folder: RunFolder
    closed: list[StepManifest]
    going: list[Commit]

    def tables(self, stage: str) -> list[tuple[int, str]]:
        """Step and address of every table of a stage."""
        found = [(step.step, str(ref["uri"])) for step in self.closed for ref in tables_of(step, stage)]
        going = [commit for commit in self.going if Slot.parse(commit.slot).stage == stage]
        return found + [(len(self.closed), ref.uri) for commit in going for ref in commit.tables.values()]


def committed(folder: RunFolder) -> Committed:
    """Read once, for all that is asked of it."""
    closed = [manifest.load(folder, step) for step in manifest.finished_steps(folder)]
    step = len(closed)
    return Committed(folder, closed, StepStore(folder.step(step), folder.run_id, step).commits())


def query(folders: list[RunFolder], statement: str) -> pa.Table:
    """The rows of `statement` over some runs."""
    connection = duckdb.connect()
    filesystem = next((files.filesystem(folder.uri)[0] for folder in folders if not files.is_local(folder.uri)), None)
    if filesystem is not None:
        connection.register_filesystem(filesystem)
    _create_views(connection, folders)
    try:
        relation = connection.sql(statement)
        return pa.table({}) if relation is None else relation.to_arrow_table()
    except duckdb.Error as error:
        raise ValueError(f"DuckDB refused the query: {' '.join(str(error).split())}") from None


def _create_views(connection: duckdb.DuckDBPyConnection, folders: list[RunFolder]) -> None:
    stored = [committed(folder) for folder in folders]
    for name, stage in (("rollouts", "filter"), ("batches", "optimize")):
        _view(connection, name, [uri for run in stored for _, uri in run.tables(stage)], ROLLOUTS)
    served = [(run.folder.run_id, step, uri) for run in stored for step, uri in run.tables("sample")]
    _view(connection, "served", [uri for _, _, uri in served], PROMPTS, filename=True)
    names = ("run_id", "step", "filename")
    tables = (
        pa.table({name: [row[at] for row in served] for at, name in enumerate(names)}) if served else _no_servings()
    )
    connection.register("serving_files", tables)
    connection.execute(_PROMPTS)
    closed = [step for run in stored for step in run.closed]
    connection.register("steps", _steps(closed))
    connection.register("metrics", _metrics(closed))
    connection.execute(_VERDICTS)
    connection.execute(_DROPS)


def _no_servings() -> pa.Table:
    return pa.schema([("run_id", pa.string()), ("step", pa.int32()), ("filename", pa.string())]).empty_table()


def _view(
    connection: duckdb.DuckDBPyConnection, name: str, uris: list[str], schema: pa.Schema, *, filename: bool = False
) -> None:
    """A view over Parquet files, with their names in `filename` if asked; an empty one of `schema` over none."""
    if not uris:
        empty = schema.empty_table()
        connection.register(name, empty.append_column("filename", pa.array([], pa.string())) if filename else empty)
        return
    listed = ", ".join("'" + uri.replace("'", "''") + "'" for uri in uris)
    connection.execute(f"CREATE VIEW {name} AS SELECT * FROM read_parquet([{listed}], filename = {filename})")


def _steps(closed: list[StepManifest]) -> pa.Table:
    rows = [
        {
            "run_id": step.run_id,
            "step": step.step,
            "version_in": step.version_in,
            "version_out": step.version_out,
            "checkpoint": step.checkpoint,
            "attempt": step.attempt,
            "accounting": json.dumps(step.accounting),
        }
        for step in closed
    ]
    names = ("version_in", "version_out", "checkpoint")
    text = [(name, pa.string()) for name in names]
    fields = [
        ("run_id", pa.string()),
        ("step", pa.int32()),
        *text,
        ("attempt", pa.int32()),
        ("accounting", pa.string()),
    ]
    return pa.Table.from_pylist(rows, schema=pa.schema(fields))


def _metrics(closed: list[StepManifest]) -> pa.Table:
    rows = [
        {"run_id": step.run_id, "step": step.step, "metric": name, "value": float(value)}
        for step in closed
        for name, value in step.metrics.items()
    ]
    fields = [("run_id", pa.string()), ("step", pa.int32()), ("metric", pa.string()), ("value", pa.float64())]
    return pa.Table.from_pylist(rows, schema=pa.schema(fields))


def write(result: pa.Table, out: str) -> None:
    """The rows as a file of the kind that its name says."""
    kind = out.rpartition(".")[2]
    sink = pa.BufferOutputStream()
    if kind == "parquet":
        pq.write_table(result, sink)
    elif kind == "csv":
        csv.write_csv(result, sink)
    elif kind == "json":
        sink.write(json.dumps(result.to_pylist(), default=str).encode())
    else:
        raise ValueError(f"--out {out!r} must end with .csv, .json or .parquet")
    files.publish(out, sink.getvalue().to_pybytes(), overwrite=True)


def as_rows(result: pa.Table) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Column names and rows."""
    return result.column_names, list(zip(*(column.to_pylist() for column in result.columns), strict=True))
