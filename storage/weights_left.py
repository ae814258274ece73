"""What weights a step of a run left: where they are, their version, and whether their files are there."""

from dataclasses import dataclass

from milepost.storage import checkpoints, retention
from milepost.storage.manifest import StepManifest
from milepost.storage.runs import RunFolder, RunRecord
from milepost.storage.taught import came_of, model_of, taught


@dataclass(frozen=True)
class Left:
    """`version` is empty where a step left none; `state` is in words."""

    uri: str
    version: str
    state: str


def left_by(folder: RunFolder, record: RunRecord, last: StepManifest) -> Left:
    """What the step left; a fine-tuning leaves a model, and only at its end."""
    if taught(record) is None:
        return Left(folder.checkpoint(last.step + 1), last.version_out, _state(folder, last))
    ended = came_of(folder)
    if ended is None or ended["steps"] != last.step + 1:
        return Left(model_of(folder), "", "no weights: a fine-tuning keeps those of its last step")
    digest = str(ended["version"]).partition("-")[2]
    return Left(model_of(folder), f"{ended['steps']}-{digest}", "complete")


def _state(folder: RunFolder, last: StepManifest) -> str:
    if not last.version_out:
        return "no weights: its samples were imported"
    if last.version_in == last.version_out:
        return "the model as it was: the run trains nothing"
    if not last.checkpoint:
        return "not saved: checkpoint.every_steps left it out"
    if last.step + 1 in retention.removed(folder):
        stay = ", ".join(map(str, checkpoints.complete(folder, hashes=False))) or "none"
        by = "checkpoint.keep_last and checkpoint.keep_every"
        return f"saved by step {last.step} and removed since by {by}; still there: {stay}"
    wrong = checkpoints.faults(folder.checkpoint(last.step + 1), hashes=False)
    return "; ".join(wrong) if wrong else "complete"
