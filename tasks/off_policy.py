"""Importance weights: what a token counts in the loss when another policy made it than the one that is trained.

The ratio is of the trainer's probability before the step over that by the engine that drew the token. Both are stored,
and neither depends on what is trained next: the weights are constants, worked out once for a whole step before it is
cut into batches, so that no split into batches, micro-batches or ranks changes one. A masked token is read by nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from milepost.storage.off_policy import Level, OffPolicySection
from milepost.storage.tables import with_columns

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

LOG_RATIO_LIMIT = 20.0  # exp of it, squared and summed, is still an ordinary number


def ratio_of(log_ratio: Floats) -> Floats:
    limited: Floats = np.exp(np.clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    return limited


@dataclass(frozen=True)
class LogRatios:
    """The trained tokens of some samples: the sample of each, from 0 and in order, and the log of its ratio."""

    sample: NDArray[np.int64]
    token: Floats

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Trained tokens of each sample."""
        return np.bincount(self.sample)

    def sums(self) -> Floats:
        """Of each sample."""
        return np.bincount(self.sample, self.token).astype(np.float64)

    def of_samples(self, level: Level) -> Floats:
        """The log ratio of each sample: the log of the product, or of the geometric mean, of its tokens' ratios."""
        sums = self.sums()
        return sums / self.lengths if level == "geometric" else sums

    def ratios(self, level: Level) -> Floats:
        """The ratio of each token at a level."""
        return ratio_of(self.token if level == "token" else self.of_samples(level)[self.sample])


def flat(table: pa.Table, column: str) -> Floats:
    """The numbers of a list column behind each other."""
    return np.asarray(pc.list_flatten(table[column].combine_chunks()), np.float64)


def is_trained(table: pa.Table) -> Flags:
    """Of each response token."""
    return np.asarray(flat(table, "loss_mask") != 0)


def log_ratios(table: pa.Table) -> LogRatios:
    """Those of a table whose log-probabilities of trainer and engine are all known."""
    trained = is_trained(table)
    lengths = np.asarray(pc.list_value_length(table["loss_mask"]).combine_chunks(), np.int64)
    samples = np.repeat(np.arange(table.num_rows), lengths)[trained]
    log_ratio = flat(table, "old_logprobs")[trained] - flat(table, "rollout_logprobs")[trained]
    return LogRatios(np.unique(samples, return_inverse=True)[1].astype(np.int64), log_ratio)


@dataclass(frozen=True)
class Weights:
    """What each trained token counts, and which of them a bound has changed or one of the other rules left out."""

    values: Floats
    clipped: Flags
    rejected: Flags
    vetoed: Flags


def _all_ones(ratio: Floats, low: float, high: float) -> Floats:
    return np.ones_like(ratio)


def _clipped(ratio: Floats, low: float, high: float) -> Floats:
    return np.clip(ratio, low, high)


def _masked(ratio: Floats, low: float, high: float) -> Floats:
    return np.where((ratio >= low) & (ratio <= high), ratio, 0.0)


# `truncate` (arXiv:2503.14286) is `clip` without a lower bound; `mask` at the token level is IcePop.
_WEIGHTS: dict[str, Callable[[Floats, float, float], Floats]] = {
    "none": _all_ones,
    "truncate": _clipped,
    "clip": _clipped,
    "mask": _masked,
}


def weigh(found: LogRatios, chosen: OffPolicySection) -> Weights:
    """What each token counts under the rules of the section."""
    ratio = found.ratios(chosen.level)
    values = _WEIGHTS[chosen.weights](ratio, *chosen.bounds)
    clipped = (values != ratio) & (chosen.weights != "none")
    if chosen.normalize:
        values = values / (_mean(values, found, chosen.level) or 1.0)  # all of them 0: so they stay
    low, high = chosen.reject_bounds
    compared = found.ratios(chosen.reject) if chosen.reject != "none" else np.ones_like(ratio)
    rejected = (compared < low) | (compared > high) if chosen.reject != "none" else np.zeros_like(clipped)
    vetoed = _vetoed(found, chosen.veto)
    return Weights(np.where(rejected | vetoed, 0.0, values), clipped, rejected, vetoed)


def _mean(values: Floats, found: LogRatios, level: Level) -> float:
    """Of the tokens or, where all tokens of a sample have the same weight, of the samples."""
    if not len(values):
        return 0.0
    each = values if level == "token" else np.bincount(found.sample, values) / found.lengths
    return float(each.mean())


def _vetoed(found: LogRatios, threshold: float | None) -> Flags:
    """The tokens of samples that have one whose ratio is below the threshold."""
    if threshold is None:
        return np.zeros(len(found.token), np.bool_)
    hits = np.bincount(found.sample, found.token < np.log(threshold))
    return np.asarray(hits[found.sample] > 0)


def with_importance_weights(table: pa.Table, chosen: OffPolicySection) -> pa.Table:
    """The table with the weight of every token, 0 for masked ones; as it is where ratios decide nothing."""
    if not chosen.weighs:
        return table
    if lacking := table["rollout_logprobs"].null_count:
        raise ValueError(
            f"{lacking} of {table.num_rows} samples have no rollout_logprobs to compare with: set off_policy.weights "
            "and off_policy.reject to none, and leave off_policy.veto empty"
        )
    trained = is_trained(table)
    values = np.zeros(len(trained))
    values[trained] = weigh(log_ratios(table), chosen).values
    ends = np.cumsum(np.asarray(pc.list_value_length(table["loss_mask"]).combine_chunks(), np.int64))
    return with_columns(table, {"importance_weights": list(np.split(values, ends[:-1]))})
