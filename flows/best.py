"""Which checkpoint of a run somebody means: one by its step, the latest, or the best by an evaluation metric."""

from collections.abc import Sequence

from milepost.flows.results import evaluations, held_out
from milepost.storage import attempts, checkpoints
from milepost.storage.parameters import CheckpointSection
from milepost.storage.retention import removed
from milepost.storage.runs import RunFolder
from milepost.tasks.watched import Point, best_of


class RemovedCheckpoint(LookupError):
    """A checkpoint that was there, and whose place newer ones took."""


def best_checkpoint(folder: RunFolder, section: CheckpointSection, saved: Sequence[int]) -> Point | None:
    """Of the checkpoints `saved`, the one whose metric is the best; None when none of them was evaluated."""
    if section.best_metric:
        metric = section.best_metric
        values = {after: found[metric] for after, found in held_out(folder).items() if metric in found}
    else:
        values = {item.step: item.mean for item in evaluations(folder)}
    found: Point | None = best_of({after: value for after, value in values.items() if after in saved}, section.best_is)
    return found


def metric_name(section: CheckpointSection) -> str:
    return section.best_metric or "held-out accuracy"


def best_line(folder: RunFolder, section: CheckpointSection) -> dict[str, str]:
    """The best checkpoint for people; nothing when there is none."""
    best = best_checkpoint(folder, section, checkpoints.complete(folder, hashes=False))
    if best is None:
        return {}
    return {"best": f"{folder.checkpoint(best.after)}, {metric_name(section)} {best.value:.4g}"}


def saved_step(folder: RunFolder, which: str, saved: Sequence[int]) -> int:
    """How often the weights were trained; 0 is the model that the run began with."""
    known = ", ".join(str(step) for step in (0, *saved))
    if which in ("latest", "best") and not saved:
        raise LookupError(f"run {folder.run_id!r} has no checkpoint yet: wait for one, or give {folder.run_id}@0")
    if which == "latest":
        return saved[-1]
    if which == "best":
        return _best(folder, saved)
    if not (which.isascii() and which.isdigit()):
        raise ValueError(f"{folder.run_id}@{which} names no step: give one of {known}, 'latest' or 'best'")
    if int(which) not in (0, *saved):
        missing = f"run {folder.run_id!r} has no checkpoint of step {which}"
        if int(which) in removed(folder):
            why = "newer ones took its place (checkpoint.keep_last, checkpoint.keep_every)"
            raise RemovedCheckpoint(f"{missing} any more, {why}: there are {known}")
        raise LookupError(f"{missing}: there are {known}")
    return int(which)


def _best(folder: RunFolder, saved: Sequence[int]) -> int:
    """The checkpoint that is the best by `checkpoint.best_metric`; of equal ones the earliest."""
    found = best_checkpoint(folder, attempts.current(folder).parameters.checkpoint, saved)
    if found is None:
        raise LookupError(
            f"run {folder.run_id!r} has evaluated none of its checkpoints "
            f"({', '.join(map(str, saved))}): set eval.every_steps, or give a step"
        )
    return found.after
