"""Importance weights, rejection and what is measured of both, by hand-computed numbers and for any numbers."""

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from milepost.flows.off_policy_checks import check_off_policy
from milepost.flows.recipe import load_recipe
from milepost.storage.off_policy import OffPolicySection
from milepost.storage.schema import ROLLOUTS, from_rows
from milepost.tasks.mismatch import mismatch_metrics
from milepost.tasks.off_policy import LogRatios, weigh, with_importance_weights
from milepost.tasks.optimize import batches

from .test_tables import rollout

Deltas = list[list[float]]


def found(*deltas: list[float]) -> LogRatios:
    sample = np.repeat(np.arange(len(deltas)), [len(each) for each in deltas])
    return LogRatios(sample, np.array([delta for each in deltas for delta in each]))


def values(deltas: Deltas, **section: Any) -> list[float]:
    return [float(value) for value in weigh(found(*deltas), OffPolicySection(**section)).values]


def table(deltas: Deltas, **columns: Any) -> pa.Table:
    """Samples whose trainer gives each token a log-probability of -1, and whose engine gave it -1 less the delta."""
    rows = []
    for at, each in enumerate(deltas):
        own: dict[str, Any] = {
            "old_logprobs": [-1.0] * len(each),
            "rollout_logprobs": [-1.0 - delta for delta in each],
            "loss_mask": [1] * len(each),
            "response_token_ids": [1] * len(each),
        }
        rows.append(rollout(f"s{at}", **own | {name: given[at] for name, given in columns.items()}))
    return from_rows(rows, ROLLOUTS)


def test_truncated_importance_sampling_and_icepop_have_their_golden_numbers() -> None:
    deltas = [[0.0, 1.0, -1.0]]
    assert values(deltas, weights="truncate") == pytest.approx([1, 2.0, 0.367879], abs=1e-6)
    assert values(deltas, weights="mask", low=0) == pytest.approx([1, 0, 0.367879], abs=1e-6)
    assert values(deltas, weights="mask") == pytest.approx([1, 0, 0])  # the lower bound is 1 / 2
    assert values(deltas, weights="clip") == pytest.approx([1, 2.0, 0.5])


def test_levels_are_the_product_and_the_geometric_mean_of_a_samples_ratios() -> None:
    deltas, wide = [[0.5, -0.2, -10.0]], {"weights": "clip", "low": 0, "high": 2}
    assert values(deltas, level="sequence", **wide) == pytest.approx([6.128e-5] * 3, rel=1e-3)
    assert values(deltas, level="geometric", **wide) == pytest.approx([0.039426] * 3, rel=1e-4)
    assert values(deltas, weights="truncate") == pytest.approx([1.648721, 0.818731, 0.0000454], rel=1e-3)
    assert values(deltas, veto=1e-4) == [0, 0, 0] and values([[0.5, -0.2, -9.0]], veto=1e-4) == [1, 1, 1]


def test_weights_compare_the_policy_before_the_step_with_the_engine() -> None:
    """Old -1, rollout -1.1: exp(0.1), whatever the policy in training says meanwhile."""
    weighed = with_importance_weights(table([[0.1]]), OffPolicySection(weights="truncate"))
    assert weighed["importance_weights"].to_pylist()[0] == pytest.approx([1.10517], abs=1e-5)


@pytest.mark.parametrize(
    ("section", "wanted"),
    [
        ({"reject": "token"}, [1, 0, 1, 1, 0]),
        ({"reject": "sequence"}, [1, 1, 1, 0, 0]),  # exp(0.65) and exp(-1.4)
        ({"reject": "geometric", "reject_high": 1.5}, [1, 1, 1, 0, 0]),  # exp(0.22) and exp(-0.7)
        ({"reject": "token", "reject_low": 0.2, "reject_high": 4}, [1, 1, 1, 1, 1]),
    ],
)
def test_what_is_out_of_bounds_is_rejected_by_token_or_by_sample(section: dict[str, Any], wanted: list[float]) -> None:
    assert values([[0.3, 1.0, -0.65], [-0.5, -0.9]], **section) == wanted


def test_normalized_weights_have_mean_one_over_tokens_or_samples_before_rejection() -> None:
    deltas = [[1.0, 0.0, 0.0], [-1.0]]
    by_token = values(deltas, weights="truncate", normalize=True)
    assert np.mean(by_token) == pytest.approx(1) and by_token[0] == pytest.approx(2 / ((2 + 1 + 1 + 0.367879) / 4))
    for level, mean in (("sequence", (2 + math.exp(-1)) / 2), ("geometric", (math.exp(1 / 3) + math.exp(-1)) / 2)):
        found_ = values(deltas, weights="truncate", level=level, normalize=True)
        assert found_[3] == pytest.approx(math.exp(-1) / mean)
    vetoed = values(deltas, weights="truncate", normalize=True, veto=0.5)
    assert vetoed == pytest.approx([*by_token[:3], 0])


MODES = st.sampled_from(["truncate", "clip", "mask"])
LEVELS = st.sampled_from(["token", "sequence", "geometric"])
DELTAS = st.lists(st.lists(st.floats(-30, 30), min_size=1, max_size=5), min_size=1, max_size=6)


@given(DELTAS, MODES, LEVELS, st.sampled_from(["none", "token", "sequence", "geometric"]), st.booleans(), st.booleans())
def test_every_combination_gives_finite_bounded_weights(
    deltas: Deltas, weights: str, level: str, reject: str, veto: bool, normalize: bool
) -> None:
    section = {"weights": weights, "level": level, "reject": reject, "veto": 1e-4 if veto else None}
    plain = np.array(values(deltas, **section))
    assert np.isfinite(plain).all() and (plain >= 0).all() and (plain <= 2.0).all()
    normalized = np.array(values(deltas, **section, normalize=normalize))
    assert np.isfinite(normalized).all() and ((normalized == 0) == (plain == 0)).all()


@given(DELTAS, MODES, LEVELS, st.booleans(), st.randoms(use_true_random=False))
def test_no_order_and_no_cut_into_batches_changes_a_weight(
    deltas: Deltas, weights: str, level: str, normalize: bool, random: Any
) -> None:
    section = OffPolicySection(weights=weights, level=level, normalize=normalize)
    whole = with_importance_weights(table(deltas), section)
    by_sample = dict(zip(whole["sample_id"].to_pylist(), whole["importance_weights"].to_pylist(), strict=True))
    order = random.sample(range(len(deltas)), len(deltas))
    mixed = with_importance_weights(table(deltas).take(order), section)
    for part in batches(mixed, 2):
        for sample, own in zip(part["sample_id"].to_pylist(), part["importance_weights"].to_pylist(), strict=True):
            assert own == pytest.approx(by_sample[sample], rel=1e-6)


def test_masked_tokens_and_samples_are_read_by_nothing() -> None:
    """Two samples of one delta, with tokens of tools and a masked sample between them that hold anything."""
    mixed = table(
        [[0.1, 5.0], [9.0], [math.nan, 0.3]],
        loss_mask=[[1, 0], [0], [0, 1]],
        old_logprobs=[[-1, math.nan], [0], [7, -1]],
    )
    section = OffPolicySection(weights="truncate", level="sequence", reject="token", veto=1e-4, normalize=True)
    alone = weigh(found([0.1], [0.3]), section).values
    weights = with_importance_weights(mixed, section)["importance_weights"].to_pylist()
    assert [weights[0][0], weights[2][1]] == pytest.approx(list(alone), rel=1e-6)
    assert (weights[0][1], weights[1], weights[2][0]) == (0, [0], 0)
    assert mismatch_metrics(mixed, section)["mismatch/ratio_max"] == pytest.approx(math.exp(0.3), rel=1e-6)


def test_without_a_rule_there_is_no_column_and_without_engine_log_probabilities_no_weight() -> None:
    known = table([[0.1]])
    assert with_importance_weights(known, OffPolicySection(opsm_delta=1e-4, max_staleness=3)) is known
    unknown = table([[0.1], [0.2]], rollout_logprobs=[None, [-1.2]])
    with pytest.raises(ValueError, match="1 of 2 samples have no rollout_logprobs to compare with: set off_policy"):
        with_importance_weights(unknown, OffPolicySection(reject="token"))
    assert mismatch_metrics(unknown, OffPolicySection())["mismatch/kl"] == pytest.approx(-0.2)
    assert mismatch_metrics(unknown.slice(0, 1), OffPolicySection()) == {}


def test_mismatch_metrics_are_those_computed_by_hand() -> None:
    """Ratios 1, 1 and 2: the engine's policy from the trainer's, over three tokens of two samples."""
    metrics = mismatch_metrics(table([[0.0, 0.0], [math.log(2)]]), OffPolicySection())
    wanted = {
        "logprob_abs_diff": math.log(2) / 3,
        "kl": -math.log(2) / 3,
        "k3": (2 - 1 - math.log(2)) / 3,
        "chi2_token": (1 + 1 + 4) / 3 - 1,
        "chi2_sequence": (1 + 4) / 2 - 1,
        "log_ppl_diff": -math.log(2) / 2,
        "log_ppl_abs_diff": math.log(2) / 2,
        "ppl_ratio": (1 + 0.5) / 2,
        "ratio_mean": 4 / 3,
        "ratio_min": 1.0,
        "ratio_max": 2.0,
        "ess": 0.888889,
    }
    assert metrics == {f"mismatch/{name}": pytest.approx(value, rel=1e-5) for name, value in wanted.items()}


def test_fractions_are_of_the_rules_that_are_on() -> None:
    deltas = [[0.0, 1.0], [-1.0, 0.0]]
    section = OffPolicySection(weights="clip", reject="token", reject_high=2.5, veto=0.4)
    metrics = mismatch_metrics(table(deltas), section)
    shares = {name: value for name, value in metrics.items() if name.endswith("_fraction")}
    assert shares == {
        "mismatch/clipped_fraction": 0.5,
        "mismatch/rejected_fraction": 0.5,
        "mismatch/vetoed_fraction": 0.5,
    }
    assert not [name for name in mismatch_metrics(table(deltas), OffPolicySection()) if "fraction" in name]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["off_policy.low=0.5"], "off_policy: low is 0.5, which weights=none does not use: leave it out"),
        (["off_policy.weights=truncate", "off_policy.low=0.5"], "which weights=truncate does not use.* clip or mask"),
        (["off_policy.normalize=true"], "normalize is True, which weights=none does not use"),
        (["off_policy.level=sequence"], "level is sequence, which weights=none does not use"),
        (["off_policy.reject_low=0.5"], "reject_low and reject_high need reject to be token, sequence or geometric"),
        (["off_policy.weights=clip", "off_policy.low=3"], "low 3 is above high 2: lower one or raise the other"),
        (["off_policy.weights=tis"], "off_policy.weights is 'tis'"),
        (["off_policy.veto=2"], "off_policy.veto is 2: input should be less than 1"),
        (
            ["off_policy.reject=token", "algorithm.old_logprobs=rollout"],
            "off_policy.reject compares .* algorithm.old_logprobs=rollout they are the same: set that to recompute",
        ),
        (["off_policy.max_staleness=0", "rollout.partial=true"], "max_staleness=0 drops all of that: raise it to 1"),
    ],
)
def test_what_does_not_go_together_is_refused_in_a_sentence(overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_off_policy(load_recipe(None, overrides)[0], generates=True)
