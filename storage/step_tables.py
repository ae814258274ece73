"""The tables of finished steps, by stage, in the columns that are asked for.

One that is not as it was written is refused in the words of `verify`.
"""

import io
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from milepost.storage.journal import Slot
from milepost.storage.manifest import StepManifest
from milepost.storage.tables import TableRef, require

SCORED = ("filter", "evaluate")  # the stages whose tables have the final form of each sample


def columns(entry: dict[str, Any], names: Sequence[str]) -> pa.Table:
    """Some columns of a stored table, when it is as it was written."""
    with pq.ParquetFile(io.BytesIO(require(TableRef(**entry)))) as table:
        return table.read(columns=list(names), use_threads=False)


def tables_of(closed: StepManifest, stage: str) -> list[dict[str, Any]]:
    """The references of every table that a stage of a finished step committed."""
    return [
        ref for entry in closed.commits if Slot.parse(entry["slot"]).stage == stage for ref in entry["tables"].values()
    ]


def sample_tables(closed: StepManifest) -> list[dict[str, Any]]:
    """The references of the tables that hold every scored sample of a finished step once, an evaluation's included.

    A fine-tuning samples nothing: its batches hold what it learnt.
    """
    return [ref for stage in SCORED for ref in tables_of(closed, stage)] or tables_of(closed, "optimize")
