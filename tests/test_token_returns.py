"""Advantages of single tokens by hand, and that whitening does what it says whatever the table looks like."""

import math

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from milepost.engines.divergence import KL_ESTIMATORS, kl
from milepost.storage.schema import ROLLOUTS, from_rows
from milepost.storage.training import AlgorithmSection
from milepost.tasks.advantages import advantage_columns, compute
from milepost.tasks.critic import critic_metrics
from milepost.tasks.prepare import with_advantages
from milepost.tasks.token_returns import divergence, gae_advantages, returns, returns_to_learn, whitened

from .test_tables import rollout

CLOSE = {"abs": 1e-6}
VARIANCE = "train/explained_variance"


def rollouts(rewards: list[float | None], old: list[list[float]], mask: list[list[int]], group: str = "") -> pa.Table:
    """A table whose reference gives every token probability 1."""
    floats = pa.list_(pa.float32())
    return pa.table(
        {
            "group_id": list(group or "a" * len(rewards)),
            "reward": pa.array(rewards, pa.float64()),
            "response_token_ids": pa.array([[1] * len(row) for row in mask], pa.list_(pa.int32())),
            "loss_mask": pa.array(mask, pa.list_(pa.uint8())),
            "old_logprobs": pa.array(old, floats),
            "ref_logprobs": pa.array([[0.0] * len(row) for row in old], floats),
        }
    )


def with_values(table: pa.Table, values: list[list[float]], name: str = "values") -> pa.Table:
    return table.append_column(name, pa.array(values, pa.list_(pa.float32())))


@pytest.mark.parametrize(
    ("mask", "gamma", "expected"), [([1, 0, 1], 1.0, [0.94, 0.95, 0.97]), ([1, 1, 0], 0.5, [0.4725, 0.965, -0.03])]
)
def test_the_reward_comes_at_the_last_trained_token_and_is_discounted_before_it(
    mask: list[int], gamma: float, expected: list[float]
) -> None:
    assert returns(1.0, [0.01, 0.02, 0.03], mask, gamma=gamma) == pytest.approx(expected)


def test_without_a_trained_token_a_reward_goes_nowhere() -> None:
    assert returns(1.0, [0.0, 0.0], [0, 0], gamma=1.0) == [0.0, 0.0]
    assert returns(1.0, [], [], gamma=1.0) == []


def test_whitening_is_over_trained_tokens_and_the_others_move_along() -> None:
    assert whitened([[1, 2, 3, 100]], [[1, 1, 1, 0]])[0] == pytest.approx([-1, 0, 1, 98])
    assert whitened([[1, 2], [3], [7, 7]], [[1, 1], [1], [0, 0]])[2] == [7, 7]


@pytest.mark.parametrize("value", [0.1, 0.0, -1e9])
def test_what_does_not_differ_is_whitened_to_exact_zeros(value: float) -> None:
    assert whitened([[value] * 3, [value]], [[1, 1, 1], [1]]) == [[0.0] * 3, [0.0]]
    assert whitened([[value]], [[1]]) == [[0.0]]
    assert whitened([], []) == [] and whitened([[]], [[]]) == [[]]


Rows = st.lists(st.lists(st.tuples(st.floats(-100, 100), st.booleans()), max_size=5), min_size=1, max_size=6)


@given(Rows, st.floats(-50, 50))
def test_whitened_tokens_have_mean_0_and_variance_1_and_know_no_shift(
    rows: list[list[tuple[float, bool]]], shift: float
) -> None:
    masks = [[int(is_trained) for _, is_trained in row] for row in rows]

    def trained(columns: list[list[float]]) -> list[float]:
        return [value for row, mask in zip(columns, masks, strict=True) for value in np.array(row)[np.array(mask) > 0]]

    columns = [[value for value, _ in row] for row in rows]
    found, moved = (whitened([[value + by for value in row] for row in columns], masks) for by in (0, shift))
    if np.ptp(trained(columns) or [0]) > 0.1:
        assert math.fsum(trained(found)) == pytest.approx(0, abs=1e-9)
        assert np.var(trained(found), ddof=1) == pytest.approx(1, rel=1e-4)
        assert trained(found) == pytest.approx(trained(moved), abs=1e-6)


@given(st.sampled_from(sorted(KL_ESTIMATORS)), st.floats(-30, 30))
def test_the_divergence_is_the_one_of_the_loss(name: str, difference: float) -> None:
    numbers = torch.tensor([difference], dtype=torch.float64)
    assert divergence(name, np.array([difference])) == pytest.approx(kl(name, numbers, numbers * 0).numpy(), rel=1e-9)


def test_a_token_is_charged_before_whitening() -> None:
    table = rollouts([1.0, 0.0], [[-0.1, -0.2, -0.3], [0.0]], [[1, 0, 1], [1]])
    # k2 of 0.1 and 0.3, times 2; the token between was not written by the model.
    raw = [[1 - 0.01 - 0.09, 1 - 0.09, 1 - 0.09], [0.0]]
    found = advantage_columns(table, "reinforce_plus_plus", kl_coef=2.0, kl_estimator="k2")
    assert np.concatenate(found) == pytest.approx(np.concatenate(whitened(raw, [[1, 0, 1], [1]])), **CLOSE)


def test_the_baseline_variant_compares_with_its_group_and_discounts_nothing() -> None:
    table = rollouts([1.0, 0.0, 3.0, 5.0], [[-0.2, 0.0], [0.0], [0.0], [-0.4]], [[1, 1], [1], [1], [1]], "aabb")
    raw = [[0.5 + 0.02, 0.5], [-0.5], [-1.0], [1.0 + 0.04]]
    found = advantage_columns(table, "reinforce_plus_plus_baseline", kl_coef=0.1, kl_estimator="k1")
    assert np.concatenate(found) == pytest.approx(np.concatenate(whitened(raw, [[1, 1], [1], [1], [1]])), **CLOSE)


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_an_unscorable_sample_is_charged_nothing_and_leaves_the_statistics(name: str) -> None:
    old, mask = [[-1.0], [-2.0], [-9.0, -9.0]], [[1], [1], [1, 1]]
    with_it = advantage_columns(rollouts([1.0, 0.0, None], old, mask), name, kl_coef=0.5, kl_estimator="k2")
    without = advantage_columns(rollouts([1.0, 0.0], old[:2], mask[:2]), name, kl_coef=0.5, kl_estimator="k2")
    assert with_it == [*without, [0.0, 0.0]]


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_what_is_masked_is_read_by_nothing(name: str) -> None:
    mask = [[1, 0], [1, 0]]
    clean, dirty = (
        advantage_columns(rollouts([1.0, 0.0], [[-1.0, other], [-2.0, other]], mask), name, kl_coef=0.1)
        for other in (0.0, math.nan)
    )
    assert [row[0] for row in clean] == [row[0] for row in dirty]


B4 = {"values": [0.1, 0.9, 0.2, 0.3], "mask": [1, 0, 1, 1]}


def test_generalised_advantages_pass_over_tokens_that_are_not_trained() -> None:
    found = gae_advantages(1.0, [0.0] * 4, **B4, gamma=0.9, gae_lambda=0.5)
    assert found == pytest.approx([0.25325, 0, 0.385, 0.7])
    table = with_values(rollouts([1.0], [[0.0] * 4], [B4["mask"]]), [B4["values"]])
    assert advantage_columns(table, "gae", gamma=0.9, gae_lambda=0.5)[0] == pytest.approx(found, **CLOSE)
    assert returns_to_learn(table, [found])[0] == pytest.approx([0.35325, 0, 0.585, 1])


def test_a_token_is_charged_where_it_diverges_and_the_critic_is_to_know() -> None:
    table = with_values(rollouts([1.0], [[-0.1, -0.3, -0.2]], [[1, 0, 1]]), [[0.5, 9.0, 0.25]])
    # k1: 0.1 and 0.2 times -1 are gained by being less likely than the reference has it.
    found = advantage_columns(table, "gae", kl_coef=1.0, kl_estimator="k1", gae_lambda=0.5)
    last = 1 + 0.2 - 0.25
    assert found[0] == pytest.approx([0.1 + 0.25 - 0.5 + 0.5 * last, 0, last], **CLOSE)
    assert returns_to_learn(table, found)[0] == pytest.approx([found[0][0] + 0.5, 0, 1.2], **CLOSE)


Tokens = st.lists(st.tuples(st.floats(-3, 3), st.booleans(), st.floats(-1, 1)), min_size=1, max_size=8)


@given(Tokens, st.floats(-5, 5), st.floats(0, 1), st.floats(0.5, 1))
def test_generalised_advantages_are_those_of_the_sequence_without_its_masked_tokens(
    tokens: list[tuple[float, bool, float]], reward: float, decay: float, gamma: float
) -> None:
    values, masks, charged = (list(column) for column in zip(*tokens, strict=True))
    found = gae_advantages(reward, charged, values, masks, gamma=gamma, gae_lambda=decay)
    trained = [token for token in tokens if token[1]]
    short = gae_advantages(
        reward,
        [token[2] for token in trained],
        [token[0] for token in trained],
        [1] * len(trained),
        gamma=gamma,
        gae_lambda=decay,
    )
    assert [value for value, token in zip(found, tokens, strict=True) if token[1]] == short
    assert all(value == 0 for value, token in zip(found, tokens, strict=True) if not token[1])
    whole = gae_advantages(reward, [0.0] * len(values), values, masks, gamma=1.0, gae_lambda=1.0)
    assert whole == pytest.approx([(reward - value) * is_in for value, is_in in zip(values, masks, strict=True)])


def test_returns_are_told_before_advantages_are_whitened() -> None:
    one = {"response_token_ids": [1], "loss_mask": [1], "rollout_logprobs": [0.0]}
    samples = zip("abc", [1.0, 0.0, None], [0.25, 0.25, 0.5], strict=True)
    rows = [rollout(name) | one | {"reward": reward, "values": [value]} for name, reward, value in samples]
    table = from_rows(rows, ROLLOUTS)
    found = with_advantages(table, AlgorithmSection(advantage="gae", whiten_advantages=True))
    assert np.concatenate(found["returns"].to_pylist()) == pytest.approx([1.0, 0.0, 0.5])
    assert np.concatenate(found["advantages"].to_pylist()) == pytest.approx([0.5**0.5, -(0.5**0.5), 0], **CLOSE)


def test_a_critic_that_expects_the_returns_explains_all_of_their_variance() -> None:
    bare = rollouts([1.0, 3.0], [[0.0] * 2] * 2, [[1, 0], [1, 1]])

    def measured(values: list[list[float]], returns: list[list[float]]) -> dict[str, float]:
        return critic_metrics(with_values(with_values(bare, values), returns, "returns"))

    known = measured([[1.0, 9.0], [3.0, 3.0]], [[1.0, 0.0], [3.0, 3.0]])
    assert known == {"rollout/values": pytest.approx(7 / 3), "rollout/returns": pytest.approx(7 / 3), VARIANCE: 1.0}
    assert measured([[2.0, 2.0], [2.0, 2.0]], [[1.0, 0.0], [3.0, 3.0]])[VARIANCE] == pytest.approx(0)
    assert VARIANCE not in measured([[2.0, 2.0], [2.0, 2.0]], [[1.0, 0.0], [1.0, 1.0]])


def test_without_what_a_critic_expects_there_is_no_such_advantage() -> None:
    with pytest.raises(ValueError, match="needs what a critic expects, and samples have no values"):
        compute("gae", [[1.0]])
    table = with_values(rollouts([1.0], [[0.0]], [[1]]), [[math.inf]])
    with pytest.raises(ValueError, match="not finite: lower critic.lr"):
        advantage_columns(table, "gae")


def test_any_estimator_can_be_whitened() -> None:
    assert compute("reinforce", [[1.0], [2.0, 3.0]], whiten=True) == [pytest.approx([-1]), pytest.approx([0, 1])]
    assert compute("reinforce_plus_plus", [[1.0], [2.0, 3.0]]) == [pytest.approx([-1]), pytest.approx([0, 1])]


def test_a_penalty_needs_both_log_probabilities() -> None:
    table = rollouts([1.0], [[-1.0]], [[1]]).drop_columns(["ref_logprobs"])
    with pytest.raises(ValueError, match=r"kl_coef is 0\.1 and samples have no ref_logprobs"):
        advantage_columns(table, "reinforce_plus_plus", kl_coef=0.1)
    with pytest.raises(ValueError, match="did you mean 'kl_coef'"):
        advantage_columns(table, "reinforce_plus_plus", kl_coeff=0.1)
