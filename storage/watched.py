"""Parameters of what is watched while a run goes on: bounds on metrics, when it stops early, and what it tells of.

A run also checks itself: what can only be so if the system is sound.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

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


class CheckSection(Section):
    """What a run holds of itself at every step. A violation stops it, with the numbers, and nothing of it is committed.

    There are as many log-probabilities, mask entries and advantages as tokens, and batches are as large as planned. A
    reference that has the policy's weights has its log-probabilities. In the first optimizer step after old ones were
    recomputed the mean ratio is 1, to 1e-4 in float32 and 0.05 in bfloat16, and where the clip range is wider than that
    no token is clipped, or 1 % in bfloat16. Trainer and rollout engine agree.
    """

    enabled: bool = True
    """Off checks nothing of this."""
    max_logprob_difference: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.1
    """How far the log-probabilities of trainer and rollout engine may be apart, as the mean of a step's trained tokens.

    It is held where all samples are of the current weights and old log-probabilities are recomputed. It was below 1e-5
    in float32 on a CPU, and 0.0066 for a model of 1.7 billion parameters in bfloat16 with SGLang.
    """
