"""What a run has come to: its finished steps, and its evaluations."""

from dataclasses import dataclass

from milepost.storage import files, manifest
from milepost.storage.manifest import StepManifest
from milepost.storage.runs import RunFolder


@dataclass(frozen=True)
class Evaluation:
    """Held-out accuracy after `step` steps."""

    step: int
    mean: float
    low: float
    high: float
    count: int


def evaluations(folder: RunFolder) -> list[Evaluation]:
    """The evaluations a run has stored, in order of step."""
    place = files.join(folder.uri, "evals")
    found = []
    for name in files.names(place):
        commit = files.join(place, name, "journal", "evaluate-r0.json")
        if files.exists(commit):
            found.append(Evaluation(int(name), **files.read_json(commit)["record"]))
    return found


def finished(folder: RunFolder) -> list[StepManifest]:
    return [manifest.load(folder, step) for step in manifest.finished_steps(folder)]


def curve(steps: list[StepManifest], name: str) -> list[float]:
    return [step.metrics[name] for step in steps if name in step.metrics]
