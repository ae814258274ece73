"""How far the trainer, before a step, and the engine that drew the samples are apart: numbers over a step's tokens.

They are of the rollout's own log-probabilities, whether or not anything is corrected for: what is not watched is found
when it has done its harm. Ratio, trained token and sample are as in off_policy.py.
"""

import math

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from milepost.storage.off_policy import OffPolicySection
from milepost.tasks.off_policy import LogRatios, log_ratios, ratio_of, weigh


def mismatch_metrics(table: pa.Table, chosen: OffPolicySection) -> dict[str, float]:
    """Those of the samples whose engine's log-probabilities are known; nothing when there are none."""
    found = log_ratios(table.filter(pc.is_valid(table["rollout_logprobs"])))
    if not len(found.token):
        return {}
    metrics = _divergence(found) | _perplexity(found) | _ratios(found) | _fractions(found, chosen)
    return {f"mismatch/{name}": value for name, value in metrics.items() if math.isfinite(value)}


def _divergence(found: LogRatios) -> dict[str, float]:
    """Of the engine's policy from the trainer's: means over the tokens, and of `chi2_sequence` over the samples.

    `kl` is the plain estimate and `k3` the one that is never negative; chi-square is the mean squared ratio less 1.
    """
    apart, ratio, product = found.token, ratio_of(found.token), ratio_of(found.sums())
    return {
        "logprob_abs_diff": float(np.abs(apart).mean()),
        "kl": float(-apart.mean()),
        "k3": float((ratio - 1 - apart).mean()),
        "chi2_token": float((ratio**2).mean() - 1),
        "chi2_sequence": float((product**2).mean() - 1),
    }


def _perplexity(found: LogRatios) -> dict[str, float]:
    """The trainer's log-perplexity of a sample less the engine's, as the mean of the samples, and as a ratio."""
    apart = -found.of_samples("geometric")
    return {
        "log_ppl_diff": float(apart.mean()),
        "log_ppl_abs_diff": float(np.abs(apart).mean()),
        "ppl_ratio": float(ratio_of(apart).mean()),
    }


def _ratios(found: LogRatios) -> dict[str, float]:
    """`ess` is the share of the tokens that would count as much if all ratios were equal (Kish)."""
    ratio = found.ratios("token")
    return {
        "ratio_mean": float(ratio.mean()),
        "ratio_min": float(ratio.min()),
        "ratio_max": float(ratio.max()),
        "ess": float(ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum())),
    }


def _fractions(found: LogRatios, chosen: OffPolicySection) -> dict[str, float]:
    """Shares of the tokens that each rule which is on has changed or left out."""
    weights = weigh(found, chosen)
    rules = {
        "clipped_fraction": (chosen.weights != "none", weights.clipped),
        "rejected_fraction": (chosen.reject != "none", weights.rejected),
        "vetoed_fraction": (chosen.veto is not None, weights.vetoed),
    }
    return {name: float(tokens.mean()) for name, (is_on, tokens) in rules.items() if is_on}
