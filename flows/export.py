"""`milepost export`: the samples of a run in a file that others read, or as a DataFrame; one table at a time."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from milepost.flows.progress import progress_bar
from milepost.flows.step_range import step_range
from milepost.storage import attempts, files, manifest, runs
from milepost.storage.documents import documents, with_messages
from milepost.storage.journal import Slot
from milepost.storage.manifest import StepManifest
from milepost.storage.runs import RunFolder
from milepost.storage.schema import ROLLOUTS
from milepost.storage.step_tables import tables_of
from milepost.storage.tables import TableRef, read_table
from milepost.storage.taught import require_other
from milepost.storage.text import to_json

Write = Callable[[pa.Table], None]


@dataclass(frozen=True)
class Exported:
    """What was written: the file, its rows, and how many steps they are of."""

    file: str
    rows: int
    steps: int


def export(
    folder: RunFolder, out: str, *, steps: str = "", kept: bool = False, tokens: bool = True, overwrite: bool = False
) -> Exported:
    """Write a row for each sample of finished steps to `out`, a .jsonl or .parquet file, which is there whole or not.

    With `kept` only what was trained on, with its advantages; of a run without a trainer what its filter kept.
    """
    kind = out.rpartition(".")[2]
    if kind not in WRITERS:
        raise ValueError(f"--out {out!r} must end with .jsonl or .parquet")
    if files.exists(out) and not overwrite:
        raise _taken(out)
    chosen = _finished(folder, steps)
    rows = 0
    try:
        with files.writing(out, overwrite=overwrite) as file, WRITERS[kind](file, tokens) as write:
            with progress_bar(f"export {folder.run_id}", len(chosen)) as advance:
                for step in chosen:
                    for table in _tables(folder, step, kept=kept):
                        write(table)
                        rows += table.num_rows
                    advance(f"{rows} rows")
    except files.AlreadyPublished:
        raise _taken(out) from None
    return Exported(out, rows, len(chosen))


def frame(run: str, root: str = "runs", *, steps: str = "", kept: bool = False, tokens: bool = True) -> pd.DataFrame:
    """The samples of a run as a DataFrame with the columns of an exported Parquet file; `steps` is "a:b"."""
    folder = runs.run_folder(root, run)
    found = [table for step in _finished(folder, steps) for table in _tables(folder, step, kept=kept)]
    tables = [with_messages(table, tokens=tokens) for table in found or [ROLLOUTS.empty_table()]]
    whole: pd.DataFrame = pa.concat_tables(tables).to_pandas(maps_as_pydicts="strict")
    return whole


def _finished(folder: RunFolder, steps: str) -> range:
    require_other(folder.run_id, attempts.current(folder))
    finished = manifest.finished_steps(folder)
    if not finished:
        raise LookupError(f"run {folder.run_id!r} has finished no step: there is nothing to export yet")
    return step_range(steps, len(finished))


def _taken(out: str) -> FileExistsError:
    return FileExistsError(f"{out} exists: choose another name, or say --overwrite")


def _tables(folder: RunFolder, step: int, *, kept: bool) -> Iterator[pa.Table]:
    closed = manifest.load(folder, step)
    stage = "optimize" if kept and _has_trained(closed) else "filter"
    for ref in tables_of(closed, stage):
        table = read_table(TableRef(**ref))
        yield table.filter(table["kept"]) if kept else table


def _has_trained(closed: StepManifest) -> bool:
    return any(Slot.parse(entry["slot"]).stage == "optimize" for entry in closed.commits)


@contextmanager
def _jsonl(file: IO[bytes], tokens: bool) -> Iterator[Write]:
    def write(table: pa.Table) -> None:
        file.writelines(f"{to_json(document)}\n".encode() for document in documents(table, tokens=tokens))

    yield write


@contextmanager
def _parquet(file: IO[bytes], tokens: bool) -> Iterator[Write]:
    schema = with_messages(ROLLOUTS.empty_table(), tokens=tokens).schema
    with pq.ParquetWriter(file, schema, compression="zstd") as writer:
        yield lambda table: writer.write_table(with_messages(table, tokens=tokens))


WRITERS = {"jsonl": _jsonl, "parquet": _parquet}
