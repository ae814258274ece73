"""Parameters of what is done about samples that another policy has made than the one that is trained."""

from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, model_validator

from milepost.storage.section import Section

Level = Literal["token", "sequence", "geometric"]
Limit = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Bounds = tuple[float, float]


class OffPolicySection(Section):
    """What is done where trainer and rollout engine differ in how likely a token is, or samples are old.

    The ratio of a token is its probability by the trainer, before the step, over that by the engine that drew it. What
    is weighed or rejected changes the sum of the loss and not what it is divided by.
    """

    weights: Literal["none", "truncate", "clip", "mask"] = "none"
    """What the loss of a token is multiplied by: `truncate` is the ratio up to `high`, `clip` the ratio kept between
    `low` and `high`, `mask` the ratio and 0 outside of them.

    With level `token`, `truncate` is known as truncated importance sampling (TIS), and `mask` as IcePop.
    """
    level: Level = "token"
    """Whose ratio: each token's own, or for all tokens of a sample the product (`sequence`) or the geometric mean."""
    low: NonNegativeFloat | None = None
    """Lower bound of `clip` and `mask`; 1 / `high` when empty."""
    high: Limit = 2.0
    """Upper bound of the weights."""
    reject: Literal["none", "token", "sequence", "geometric"] = "none"
    """Leave out tokens whose ratio is out of bounds, or samples whose product or geometric mean of ratios is."""
    reject_low: NonNegativeFloat | None = None
    """Lower bound of what is not rejected; 1 / the upper one when empty."""
    reject_high: Limit | None = None
    """Upper bound of what is not rejected; `high` when empty."""
    veto: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Leave out every sample with a token whose ratio is below this, such as 1e-4; empty for none."""
    normalize: bool = False
    """Divide the weights by their mean over the step, before anything is rejected.

    It is the mean over all trained tokens for level `token`, and over the samples for the others.
    """
    opsm_delta: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Leave out samples of negative advantage from which the policy has gone further away than this.

    That is measured as their mean log-probability before the step less that now: off-policy sequence masking, usually
    with 1e-4.
    """
    max_staleness: NonNegativeInt | None = None
    """Drop samples, as `stale`, with a token of weights that are more steps behind the policy than this."""

    @property
    def bounds(self) -> Bounds:
        """Of the weights; `truncate` has no lower one."""
        if self.weights == "truncate":
            return 0.0, self.high
        return (1 / self.high if self.low is None else self.low), self.high

    @property
    def reject_bounds(self) -> Bounds:
        high = self.high if self.reject_high is None else self.reject_high
        return (1 / high if self.reject_low is None else self.reject_low), high

    @property
    def weighs(self) -> bool:
        """Whether ratios decide what a token counts."""
        return self.weights != "none" or self.reject != "none" or self.veto is not None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        unused = [
            *(["low"] if self.low is not None and self.weights in ("none", "truncate") else []),
            *(["level"] if self.level != "token" and self.weights == "none" else []),
            *(["normalize"] if self.normalize and self.weights == "none" else []),
        ]
        if unused:
            raise ValueError(
                f"{unused[0]} is {getattr(self, unused[0])}, which weights={self.weights} does not use: leave it out, "
                f"or set weights to {'clip or mask' if unused[0] == 'low' else 'truncate, clip or mask'}"
            )
        if self.reject == "none" and (self.reject_low, self.reject_high) != (None, None):
            raise ValueError("reject_low and reject_high need reject to be token, sequence or geometric: set it too")
        for name, (low, high) in (("", self.bounds), ("reject_", self.reject_bounds)):
            if low > high:
                raise ValueError(f"{name}low {low:g} is above {name}high {high:g}: lower one or raise the other")
        return self
