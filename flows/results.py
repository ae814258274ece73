"""What a run has come to: its finished steps, and its evaluations."""

import math
from dataclasses import dataclass

from milepost.storage import files, manifest
from milepost.storage.journal import Slot
from milepost.storage.manifest import StepManifest
from milepost.storage.runs import RunFolder


@dataclass(frozen=True)
class Evaluation:
    """Held-out accuracy after `step` steps, on the first data set; NaN when no sample has a score."""

    step: int
    mean: float
    low: float
    high: float
    count: int


def evaluation_folder(folder: RunFolder, step: int) -> str:
    """Where the evaluation of the weights after `step` trained steps is stored."""
    return files.join(folder.uri, "evals", f"{step:06d}")


def evaluations(folder: RunFolder) -> list[Evaluation]:
    """The evaluations a run has stored, in order of step."""
    found = (_evaluation(folder, step) for step in _begun(folder))
    return [evaluation for evaluation in found if evaluation]


def latest_evaluation(folder: RunFolder) -> Evaluation | None:
    """The newest of them, without reading the others."""
    found = (_evaluation(folder, step) for step in reversed(_begun(folder)))
    return next((evaluation for evaluation in found if evaluation), None)


def own_score(folder: RunFolder) -> float | None:
    """The score of a run that is an evaluation, on its first data set; None for any other run."""
    found = _scored(folder.step(0), 0)
    return found.mean if found else None


def _begun(folder: RunFolder) -> list[int]:
    return [int(name) for name in files.names(files.join(folder.uri, "evals")) if name.isdigit()]


def _evaluation(folder: RunFolder, step: int) -> Evaluation | None:
    return _scored(evaluation_folder(folder, step), step)


def _scored(place: str, step: int) -> Evaluation | None:
    """The evaluation that is stored at `place`; None for one that has not ended."""
    commit = files.join(place, "journal", "evaluate-r0.json")
    if not files.exists(commit):
        return None
    record = files.read_json(commit)["record"]
    mean = math.nan if record["mean"] is None else record["mean"]
    return Evaluation(step, mean, record["low"], record["high"], record["count"])


def held_out(folder: RunFolder) -> dict[int, dict[str, float]]:
    """Every metric of the evaluations that a run has stored, as eval/SET/NAME, by trained steps."""
    return {step: metrics for step in _begun(folder) if (metrics := _metrics(folder, step))}


def _metrics(folder: RunFolder, step: int) -> dict[str, float]:
    from milepost.tasks.eval_scores import SetScore  # takes a tenth of a second that a table of runs does not need

    place = files.join(evaluation_folder(folder, step), "journal")
    ended = [name for name in files.names(place) if Slot.parse(name.removesuffix(".json")).stage == "evaluate"]
    found = (files.read_json(files.join(place, name))["record"] for name in ended)
    return {name: value for record in found if "name" in record for name, value in SetScore(**record).metrics().items()}


def finished(folder: RunFolder) -> list[StepManifest]:
    return [manifest.load(folder, step) for step in manifest.finished_steps(folder)]


def curve(steps: list[StepManifest], name: str) -> list[float]:
    return [step.metrics[name] for step in steps if name in step.metrics]
