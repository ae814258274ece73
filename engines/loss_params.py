"""What a configuration may say about losses, checked before anything runs and without importing torch."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from milepost.engines.divergence import KL_ESTIMATORS
from milepost.storage.registry import check_arity, load_dotted, nearest, resolve

GROUP = "milepost.losses"
AGGREGATIONS = ("sample_mean", "token_mean", "constant")
_MODULE = "milepost.engines.losses"
LOSSES = {name: f"{_MODULE}:{name}" for name in ("ppo_clip", "gspo", "cispo", "sapo", "policy_gradient", "sft")}

# The losses that use a parameter, where not all do.
_USERS = {
    "clip_low": ("ppo_clip", "gspo", "cispo"),
    "clip_high": ("ppo_clip", "gspo", "cispo"),
    "dual_clip": ("ppo_clip", "gspo"),
    "tau_positive": ("sapo",),
    "tau_negative": ("sapo",),
    "opsm_delta": tuple(name for name in LOSSES if name != "sft"),
}


@dataclass(frozen=True)
class LossParams:
    """What a configuration may say about a built-in loss; one that does not use a parameter ignores it.

    `max_length` is the constant of `aggregation="constant"` (arXiv:2503.20783), `dual_clip` bounds the loss of negative
    advantages (arXiv:1912.09729), `kl_coef` weighs the divergence from the reference policy, which `kl_unbiased`
    multiplies by the probability ratio, `entropy_coef` weighs the bonus for entropy and `log_entropy` asks for entropy
    without one, `opsm_delta` masks negative samples that the policy has left, `tau_*` are SAPO's.
    """

    clip_low: float = 0.2
    clip_high: float | None = None
    dual_clip: float | None = None
    aggregation: str = "sample_mean"
    max_length: int | None = None
    kl_coef: float = 0.0
    kl_estimator: str = "low_var"
    kl_unbiased: bool = False
    entropy_coef: float = 0.0
    log_entropy: bool = False
    opsm_delta: float | None = None
    tau_positive: float = 1.0
    tau_negative: float = 1.05

    def __post_init__(self) -> None:
        if self.aggregation not in AGGREGATIONS:
            raise ValueError(f"aggregation is {self.aggregation!r}, it must be one of {', '.join(AGGREGATIONS)}")
        if self.aggregation == "constant" and (self.max_length is None or self.max_length < 1):
            raise ValueError(
                f"aggregation 'constant' divides by max_length, which is {self.max_length!r}: set it to 1 or more"
            )
        if not 0 <= self.clip_low <= 1:
            raise ValueError(f"clip_low is {self.clip_low!r}, it must be between 0 and 1")
        if self.clip_high is not None and not self.clip_high >= 0:
            raise ValueError(f"clip_high is {self.clip_high!r}, it must be 0 or more")
        if self.dual_clip is not None and not self.dual_clip > 1:
            raise ValueError(f"dual_clip is {self.dual_clip!r}, it must be more than 1")
        for name in ("tau_positive", "tau_negative"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)!r}, it must be more than 0")
        if self.kl_estimator not in KL_ESTIMATORS:
            raise ValueError(f"kl_estimator is {self.kl_estimator!r}, it must be one of {', '.join(KL_ESTIMATORS)}")

    @property
    def ratio_range(self) -> tuple[float, float]:
        return 1 - self.clip_low, 1 + (self.clip_low if self.clip_high is None else self.clip_high)


def loss_params(params: Mapping[str, Any]) -> LossParams:
    """`params` checked; an unknown name is refused with the nearest known one."""
    known = [field.name for field in dataclasses.fields(LossParams)]
    for name in params:
        if name not in known:
            raise ValueError(f"unknown loss parameter {name!r}{nearest(name, known)} known: {known}")
    return LossParams(**params)


def check_loss(name: str, params: Mapping[str, Any] | None = None) -> None:
    """Raise unless the loss exists and, when it is built in, takes `params` and uses those away from their default."""
    if name not in LOSSES:
        load_loss(name)
        return
    chosen, usual = loss_params(params or {}), LossParams()
    for parameter, users in _USERS.items():
        value, default = getattr(chosen, parameter), getattr(usual, parameter)
        if value != default and name not in users:
            usual_value = "empty" if default is None else f"at {default!r}"
            raise ValueError(
                f"loss {name!r} does not use {parameter}, which is {value!r}: leave it {usual_value}, or choose a loss "
                f"that does: {', '.join(users)}"
            )
    if chosen.max_length is not None and chosen.aggregation != "constant":
        raise ValueError(
            f"aggregation {chosen.aggregation!r} does not use max_length, which is {chosen.max_length}: leave it "
            "out, or set aggregation to 'constant'"
        )


def wants_entropy(params: Mapping[str, Any]) -> bool:
    """Whether a loss with `params`, built in or not, is to be given the entropy of its tokens."""
    return bool(params.get("entropy_coef") or params.get("log_entropy"))


def load_loss(name: str) -> Any:
    """The loss called `name`: a callable `(LossInputs, params) -> LossOutputs`."""
    found = resolve(name, LOSSES, group=GROUP)
    loss = load_dotted(found, group=GROUP) if isinstance(found, str) else found
    check_arity(loss, 2, name=name, group=GROUP)
    return loss
