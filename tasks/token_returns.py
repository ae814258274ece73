"""Advantages that differ from token to token: what each is charged for diverging, what follows it, and whitening.

A token that is not trained has no reward: the model did not write it, or is not to learn it. Advantages are worked out
once for the whole step, in one process, so a mean over its tokens is the mean over all data-parallel ranks.
"""

import math
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

WHITENING_EPS = 1e-8

Values = NDArray[np.float64]


def divergence(estimator: str, difference: Values) -> Values:
    """What engines.divergence estimates, for numbers without a gradient; `difference` is the policy's less the other's.

    It is the policy's own estimate at tokens that the policy before the step has sampled.
    """
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference**2 / 2
    if estimator == "k3":
        return np.expm1(-difference) + difference
    bounded = np.clip(difference, -20, 20)
    return np.clip(np.expm1(-bounded) + bounded, -10, 10)


def penalties(rollouts: pa.Table, *, kl_coef: float, kl_estimator: str) -> list[Values]:
    """What each response token is charged for the policy's divergence from the reference before the step."""
    masks = [np.asarray(mask, dtype=bool) for mask in rollouts["loss_mask"].to_pylist()]
    if not kl_coef:
        return [np.zeros(len(mask)) for mask in masks]
    for name in ("old_logprobs", "ref_logprobs"):
        if name not in rollouts.column_names or rollouts[name].null_count:
            raise ValueError(f"kl_coef is {kl_coef:g} and samples have no {name}: fill the column or set kl_coef to 0")
    old, reference = (rollouts[name].to_pylist() for name in ("old_logprobs", "ref_logprobs"))
    differences = [np.subtract(*pair) for pair in zip(old, reference, strict=True)]
    return [
        np.where(mask, kl_coef * divergence(kl_estimator, np.where(mask, difference, 0.0)), 0.0)
        for mask, difference in zip(masks, differences, strict=True)
    ]


def returns(reward: float, charged: Sequence[float] | Values, mask: Sequence[int], *, gamma: float) -> list[float]:
    """What follows each token, itself included: `reward` at the last trained one, and minus what each is `charged`."""
    found = [-float(charge) for charge in charged]
    trained = [token for token, is_trained in enumerate(mask) if is_trained]
    if trained:
        found[trained[-1]] += reward
    for token in reversed(range(len(found) - 1)):
        found[token] += gamma * found[token + 1]
    return found


def gae_advantages(
    reward: float,
    charged: Sequence[float] | Values,
    values: Sequence[float],
    mask: Sequence[int],
    *,
    gamma: float,
    gae_lambda: float,
) -> list[float]:
    """Generalised advantages of the trained tokens, and 0.0 for the others, which are passed over.

    `reward` comes at the last trained token, after which nothing is expected, also where a response was cut short.
    """
    found, ahead, expected = [0.0] * len(mask), 0.0, 0.0
    for token in reversed([token for token, is_trained in enumerate(mask) if is_trained]):
        surprise = reward - float(charged[token]) + gamma * expected - values[token]
        ahead = surprise + gamma * gae_lambda * ahead
        found[token], expected, reward = ahead, values[token], 0.0
    return found


def returns_to_learn(rollouts: pa.Table, advantages: Sequence[Sequence[float]]) -> list[list[float]]:
    """What a critic is to expect at each trained token, by how much there was more than it did; 0.0 at the others.

    It is what it expects already where a sample could not be scored, which teaches nothing.
    """
    rows = zip(rollouts["values"].to_pylist(), rollouts["loss_mask"].to_pylist(), advantages, strict=True)
    return [
        [value + more if is_trained else 0.0 for value, is_trained, more in zip(values, mask, row, strict=True)]
        for values, mask, row in rows
    ]


def whitened(columns: Sequence[Sequence[float]], trained: Sequence[Sequence[int]]) -> list[list[float]]:
    """`columns` shifted and scaled to mean 0 and unbiased variance 1 over the `trained` tokens of all rows.

    The other tokens of a row with trained ones move along; a row without any stays as it is. Zeros where nothing
    differs.
    """
    seen = [
        value
        for row, mask in zip(columns, trained, strict=True)
        for value, is_in in zip(row, mask, strict=True)
        if is_in
    ]
    if not seen:
        return [list(row) for row in columns]
    if max(seen) == min(seen):  # the mean of equal floats may differ from them
        return [[0.0] * len(row) for row in columns]
    mean = math.fsum(seen) / len(seen)
    variance = math.fsum((value - mean) ** 2 for value in seen) / (len(seen) - 1)
    scale = 1 / math.sqrt(variance + WHITENING_EPS)
    return [
        [(value - mean) * scale for value in row] if any(mask) else list(row)
        for row, mask in zip(columns, trained, strict=True)
    ]
