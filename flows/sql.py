"""SQL over stored runs, by DuckDB, without loading them first.

Tables: `rollouts` (every sample), `prompts` (every serving), `steps` and `metrics` (from the manifests), `verdicts`
(what rewards said), `drops` (samples that were not trained on, with the reason), `batches` (what the optimizer was
given) and `learnt` (those of supervised fine-tunings by the rows of their files). Each has `run_id` and `step`.
"""

import fnmatch
import json
from dataclasses import dataclass
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import csv

from milepost.flows.table_view import create_view
from milepost.storage import attempts, files, manifest, runs
from milepost.storage.journal import Commit, Slot, StepStore
from milepost.storage.manifest import StepManifest
from milepost.storage.runs import RunFolder
from milepost.storage.schema import CATALOG
from milepost.storage.schema_versions import Catalog
from milepost.storage.step_tables import SCORED, tables_of
from milepost.storage.tables import TableRef, require_all
from milepost.storage.taught import taught

# What the tables of a stage are seen as.
_VIEWS = {
    "filter": ("rollouts", "verdicts", "drops"),
    "evaluate": ("rollouts", "verdicts"),
    "optimize": ("batches", "learnt"),
    "sample": ("prompts", "served"),
}
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
_LEARNT = """
CREATE VIEW learnt AS SELECT run_id, step, file, TRY_CAST(metadata ->> '$.row' AS BIGINT) AS row, sample_id, prompt_id,
    prompt, response
FROM batches JOIN learnt_files USING (run_id)
"""


def chosen_runs(root: str, run: str, pattern: str = "") -> list[RunFolder]:
    """The run called `run` and all others of `root` whose names match `pattern`; LookupError when it is not there."""
    folder = runs.run_folder(root, run)
    attempts.current(folder)
    found = runs.run_folders(root) if pattern else []
    others = [other for other in found if fnmatch.fnmatchcase(other.run_id, pattern)]
    return [folder, *(other for other in others if other.run_id != run)]


@dataclass(frozen=True)
class Committed:
    """What a run has committed: its finished steps, and what there is of the one after them."""

    folder: RunFolder
    closed: list[StepManifest]
    going: list[Commit]

    def tables(self, stage: str) -> list[tuple[int, TableRef]]:
        """Step and reference of every table of a stage."""
        found = [(step.step, TableRef(**ref)) for step in self.closed for ref in tables_of(step, stage)]
        going = [commit for commit in self.going if Slot.parse(commit.slot).stage == stage]
        return found + [(len(self.closed), ref) for commit in going for ref in commit.tables.values()]


def committed(folder: RunFolder) -> Committed:
    """Read once, for all that is asked of it."""
    closed = [manifest.load(folder, step) for step in manifest.finished_steps(folder)]
    step = len(closed)
    return Committed(folder, closed, StepStore(folder.step(step), folder.run_id, step).commits())


def stages_named(statement: str) -> list[str]:
    """The stages whose tables a statement may read: it has to name their views for that, whatever else it says."""
    words = statement.lower()
    return [stage for stage, views in _VIEWS.items() if any(view in words for view in views)]


def query(folders: list[RunFolder], statement: str, catalog: Catalog = CATALOG) -> pa.Table:
    """The rows of `statement` over some runs, whose tables may be of any versions of `catalog`.

    DamagedTable or FileNotFoundError, as `verify` has it, when a table that it may read is not as it was written.
    """
    connection = duckdb.connect()
    filesystem = next((files.filesystem(folder.uri)[0] for folder in folders if not files.is_local(folder.uri)), None)
    if filesystem is not None:
        connection.register_filesystem(filesystem)
    try:
        _create_views(connection, folders, statement, catalog)
        relation = connection.sql(statement)
        return pa.table({}) if relation is None else relation.to_arrow_table()
    except duckdb.Error as error:
        raise ValueError(f"DuckDB refused the query: {' '.join(str(error).split())}") from None


def _create_views(
    connection: duckdb.DuckDBPyConnection, folders: list[RunFolder], statement: str, catalog: Catalog
) -> None:
    stored = [committed(folder) for folder in folders]
    require_all(ref for stage in stages_named(statement) for run in stored for _, ref in run.tables(stage))
    for view, stages in (("rollouts", SCORED), ("batches", ("optimize",))):
        tables = [ref for run in stored for stage in stages for _, ref in run.tables(stage)]
        create_view(connection, view, tables, schema="rollouts", catalog=catalog)
    found = [(run.folder.run_id, step, ref) for run in stored for step, ref in run.tables("sample")]
    tables = [ref for _, _, ref in found]
    create_view(connection, "served", tables, schema="prompts", catalog=catalog, filename=True)
    served = [(run, step, ref.uri) for run, step, ref in found]
    names = ("run_id", "step", "filename")
    places = {name: [row[at] for row in served] for at, name in enumerate(names)}
    connection.register("serving_files", pa.table(places) if served else _no_servings())
    connection.execute(_PROMPTS)
    closed = [step for run in stored for step in run.closed]
    connection.register("steps", _steps(closed))
    connection.register("metrics", _metrics(closed))
    connection.register("learnt_files", _learnt_files(folders))
    for view in (_VERDICTS, _DROPS, _LEARNT):
        connection.execute(view)


def _no_servings() -> pa.Table:
    return pa.schema([("run_id", pa.string()), ("step", pa.int32()), ("filename", pa.string())]).empty_table()


def _learnt_files(folders: list[RunFolder]) -> pa.Table:
    """The file that each fine-tuning among some runs has learnt."""
    known = ((folder.run_id, taught(runs.load(folder))) for folder in folders)
    rows = [{"run_id": run, "file": found.file} for run, found in known if found]
    return pa.Table.from_pylist(rows, schema=pa.schema([("run_id", pa.string()), ("file", pa.string())]))


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
