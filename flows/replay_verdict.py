"""The verdict of a replay: every output of every stage against the stored one."""

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from milepost.storage import attempts, manifest, purges
from milepost.storage.difference import Comparison
from milepost.storage.journal import Slot, StepStore
from milepost.storage.parameters import Parameters
from milepost.storage.parent import parent_run, steps_before
from milepost.storage.runs import RunFolder
from milepost.storage.stages import Stage
from milepost.tasks.replay import Replayed, StoredStep, compare_stage, compare_weights


@dataclass(frozen=True)
class StageVerdict:
    """One stage of one step: the first difference, empty when there is none, and the largest deviation."""

    step: int
    stage: str
    difference: str
    deviation: float


@dataclass(frozen=True)
class ReplayVerdict:
    """A replay of steps `begin` to before `end`: what was found, stage by stage."""

    run: str
    begin: int
    end: int
    tolerance: float
    stages: list[StageVerdict] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        if any(stage.difference for stage in self.stages):
            return "different"
        return "within tolerance" if any(stage.deviation for stage in self.stages) else "identical"


def as_json(found: ReplayVerdict) -> dict[str, Any]:
    return asdict(found) | {"verdict": found.verdict}


def stored_step(folder: RunFolder, step: int, parameters: Parameters | None = None) -> StoredStep:
    """A finished step with `parameters`, or else those of the attempt that made it."""
    store = StepStore(folder.step(step), folder.run_id, step)
    purges.require_whole(store.uri)
    closed = manifest.load(folder, step)
    commits = {Slot.parse(commit.slot): commit for commit in store.commits()}
    given, before = parameters or attempts.parameters_of(folder, closed.attempt), attempts.current(folder)
    return StoredStep(store, closed, commits, given, steps_before(parent_run(before)))


def stage_verdicts(
    stored: StoredStep, stages: tuple[Stage, ...], again: Replayed, digest: str, *, tolerance: float
) -> list[StageVerdict]:
    """What there is to say of `stages` and of the weights after them, whose digest now is `digest`."""
    found = {stage: compare_stage(stage, stored, again, tolerance=tolerance) for stage in stages}
    verdicts = [_verdict(stored, stage, comparison) for stage, comparison in found.items()]
    if "optimize" not in stages:
        return verdicts
    weights = compare_weights(stored, digest)
    if tolerance and weights.first:
        # Other in their last bits; the next step's log-probabilities tell how far.
        weights = Comparison(None, math.nextafter(0.0, 1.0))
    return [*verdicts, _verdict(stored, "weights", weights)]


def _verdict(stored: StoredStep, stage: str, found: Comparison) -> StageVerdict:
    return StageVerdict(stored.store.step, stage, str(found.first or ""), found.deviation)


def worst(stages: list[StageVerdict]) -> str:
    """How it looks so far, in a few words."""
    different = sum(bool(stage.difference) for stage in stages)
    return f"{different} different" if different else f"deviation {max(stage.deviation for stage in stages):.2g}"
