"""Supervised fine-tunings are runs of their own kind: each step learns one batch, and the model is there at the end."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from milepost.storage import files
from milepost.storage.runs import RunFolder, RunRecord
from milepost.storage.text import from_json

TAUGHT = "sft"  # in the data of a run's record
ROW = "row"
"""In the metadata of what was learnt: its row in the file, from 0."""
SFT_RECORD = "sft.json"
"""Written last, beside the model folder: what that comes from, for whatever begins with it."""


@dataclass(frozen=True)
class Taught:
    """What is learnt: rows of a file, those that fit the context, in batches drawn by `seed`."""

    file: str
    digest: str
    rows: int
    too_long: int
    batch_size: int
    seed: int

    def entry(self) -> dict[str, Any]:
        """For the data of a run's record."""
        return {TAUGHT: asdict(self)}


def taught(record: RunRecord) -> Taught | None:
    """What this run learns from; None for one that is no fine-tuning."""
    found = record.data.get(TAUGHT)
    return Taught(**found) if found else None


def model_of(folder: RunFolder) -> str:
    """Where a fine-tuning leaves its model."""
    return files.join(folder.uri, "model")


def came_of(folder: RunFolder) -> dict[str, Any] | None:
    """The record of a fine-tuning that came to its end; None before that."""
    uri = files.join(folder.uri, SFT_RECORD)
    return dict(files.read_json(uri)) if files.exists(uri) else None


def row_of(metadata: str) -> int | None:
    """Which row of the file something that was learnt is; None for what is purged, and from before rows were kept."""
    found = from_json(metadata).get(ROW)
    return found if isinstance(found, int) else None


def taught_by(record: RunRecord) -> tuple[RunFolder, int] | None:
    """The fine-tuning whose model a run began with, and its steps; None for a model from elsewhere."""
    model = Path(record.model["folder"])
    folder = RunFolder(str(model.parent), model.parent.name)
    if model.name != "model" or not files.exists(folder.record):
        return None
    ended = came_of(folder)
    return (folder, int(ended["steps"])) if ended else None


def last_step(folder: RunFolder) -> int:
    """How many steps a fine-tuning took; LookupError for one that has no model yet."""
    ended = came_of(folder)
    if ended is None:
        raise LookupError(f"fine-tuning {folder.run_id!r} has no model yet: wait for it, or give {go_on_with(folder)}")
    return int(ended["steps"])


def go_on_with(folder: RunFolder) -> str:
    """What to do with one that was stopped."""
    return f"the `milepost sft` that began {folder.run_id}, once more"


def require_other(run: str, record: RunRecord) -> None:
    """ValueError for a fine-tuning, which has no samples and cannot be resumed by what resumes runs."""
    if taught(record):
        raise ValueError(
            f"{run!r} is a supervised fine-tuning, which has no samples: train its model as a run of another name, or "
            "give the `milepost sft` that began it once more when it has not ended"
        )
