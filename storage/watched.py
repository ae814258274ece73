"""Parameters of what is watched while a run goes on: bounds on metrics, when it stops early, and what it tells of."""

from typing import Literal, Self

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from milepost.storage.section import Section


class Bound(Section):
    """How far a metric may go."""

    metric: str
    """A metric of the steps, such as `train/ppo_kl`, or of the held-out sets, as `eval/SET/mean`."""
    above: float | None = None
    """Crossed by a higher value."""
    below: float | None = None
    """Crossed by a lower value."""
    in_a_row: PositiveInt = 1
    """Values in a row that have to cross it: steps, or evaluations."""

    @model_validator(mode="after")
    def _has_a_side(self) -> Self:
        if self.above is None and self.below is None:
            raise ValueError(f"a bound on {self.metric!r} needs above or below")
        return self


class StopSection(Section):
    """When a run ends before its last step; nothing stops it as it is."""

    plateau_metric: str = ""
    """Stop when this metric no longer gets better: `rollout/reward`, or `eval/SET/mean`; empty for never."""
    plateau_patience: PositiveInt = 10
    """Values in a row, steps or evaluations, that may be no better than the best one before."""
    plateau_improvement: NonNegativeFloat = 0.0
    """By how much a value has to be better to count."""
    plateau_best_is: Literal["highest", "lowest"] = "highest"
    """Which way is better."""
    bounds: list[Bound] = []
    """Stop when one of these is crossed, as `[{"metric": "train/ppo_kl", "above": 0.2, "in_a_row": 3}]`."""
    max_tokens: PositiveInt | None = None
    """Stop after this many generated tokens, over all steps."""
    max_gpu_seconds: PositiveFloat | None = None
    """Stop after so many seconds of steps, times the GPUs that trainer and engines take, or 1 where they take none."""
    max_seconds: PositiveFloat | None = None
    """Stop after so many seconds of steps: their stages' recorded times, over all attempts, without evaluations."""


class AlertSection(Section):
    """What a run tells Prefect of: an event `milepost.metric.crossed`, which `milepost deploy` can send on."""

    bounds: list[Bound] = []
    """Bounds on metrics, as in `stop`: each tells of it once whenever it comes to be crossed."""
