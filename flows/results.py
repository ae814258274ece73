"""What a run has come to: its finished steps, and its evaluations."""

import math
from dataclasses import dataclass

from milepost.storage import files, manifest
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


def _begun(folder: RunFolder) -> list[int]:
    return [int(name) for name in files.names(files.join(folder.uri, "evals")) if name.isdigit()]


def _evaluation(folder: RunFolder, step: int) -> Evaluation | None:
    """None for one that has not ended."""
    commit = files.join(evaluation_folder(folder, step), "journal", "evaluate-r0.json")
    if not files.exists(commit):
        return None
    record = files.read_json(commit)["record"]
    mean = math.nan if record["mean"] is None else record["mean"]
    return Evaluation(step, mean, record["low"], record["high"], record["count"])


def finished(folder: RunFolder) -> list[StepManifest]:
    return [manifest.load(folder, step) for step in manifest.finished_steps(folder)]


def curve(steps: list[StepManifest], name: str) -> list[float]:
    return [step.metrics[name] for step in steps if name in step.metrics]
