"""Estimators of the divergence of one policy from another, from log-probabilities of sampled tokens.

Nothing here imports torch, so that a plan can be checked without it.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from milepost.storage.registry import nearest

if TYPE_CHECKING:
    from torch import Tensor


def _low_var(difference: "Tensor") -> "Tensor":
    bounded = difference.clamp(-20, 20)
    return ((-bounded).expm1() + bounded).clamp(-10, 10)


KL_ESTIMATORS: dict[str, "Callable[[Tensor], Tensor]"] = {
    "k1": lambda difference: difference,
    "k2": lambda difference: difference**2 / 2,
    "k3": lambda difference: (-difference).expm1() + difference,
    "low_var": _low_var,
}


def kl(estimator: str, logprobs: "Tensor", reference_logprobs: "Tensor") -> "Tensor":
    """Per-token estimate of the divergence of the policy from the reference, on tokens the policy sampled.

    With x = logprobs - reference_logprobs: k1 is x, k2 is x^2 / 2, k3 is exp(-x) - 1 + x, and low_var is k3 with x
    bounded to 20 and the result to 10 (joschu.net/blog/kl-approx.html).
    """
    if estimator not in KL_ESTIMATORS:
        known = list(KL_ESTIMATORS)
        raise LookupError(f"unknown KL estimator {estimator!r}{nearest(estimator, known)} known: {known}")
    return KL_ESTIMATORS[estimator](logprobs - reference_logprobs)
