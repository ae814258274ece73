"""Advantages by hand, and what an unscorable sample does to its group: nothing."""

import math
import sys
from pathlib import Path
from random import Random

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from milepost.tasks.advantages import advantage_columns, compute, get_advantage


def rollouts(groups: list[str], rewards: list[float | None], lengths: list[int]) -> pa.Table:
    tokens = pa.array([[1] * length for length in lengths], pa.list_(pa.int32()))
    return pa.table({"group_id": groups, "reward": pa.array(rewards, pa.float64()), "response_token_ids": tokens})


def close(values: list[float]) -> object:
    return pytest.approx(values, abs=1e-6)


def test_grpo_divides_by_the_unbiased_deviation() -> None:
    high, low = compute("grpo", [[1, 0, 0, 1], [1, 0, 0, 0]])
    assert high == close([0.866024, -0.866024, -0.866024, 0.866024])
    assert low == close([1.499997, -0.499999, -0.499999, -0.499999])


def test_the_other_estimators() -> None:
    assert compute("dr_grpo", [[1, 0, 0, 1]]) == [[0.5, -0.5, -0.5, 0.5]]
    assert compute("grpo", [[1, 0, 0, 1]], normalize_std=False) == [[0.5, -0.5, -0.5, 0.5]]
    assert compute("rloo", [[1, 0, 0, 0]])[0] == close([1, -1 / 3, -1 / 3, -1 / 3])
    assert compute("reinforce", [[1, 0.25], [3]]) == [[1.0, 0.25], [3.0]]


@pytest.mark.parametrize("name", ["grpo", "gspo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline"])
def test_without_spread_there_is_no_advantage(name: str) -> None:
    groups = [[1, 1, 1, 1], [0.1] * 4, [7], [None, None], [None, 3], []]
    assert compute(name, groups) == [[0.0] * len(group) for group in groups]


@pytest.mark.parametrize("name", ["grpo", "gspo", "dr_grpo", "rloo", "reinforce", "reinforce_plus_plus"])
@pytest.mark.parametrize("missing", [None, math.nan, math.inf])
def test_an_unscorable_sample_leaves_its_group_as_it_was(name: str, missing: float | None) -> None:
    [with_it], [without] = compute(name, [[1, missing, 0, 0]]), compute(name, [[1, 0, 0]])
    assert with_it == [without[0], 0.0, *without[1:]]


@given(st.lists(st.lists(st.one_of(st.none(), st.floats(-10, 10)), max_size=6), max_size=5))
def test_groups_keep_their_shape_and_sum_to_zero(groups: list[list[float | None]]) -> None:
    advantages = compute("grpo", groups)
    assert [len(group) for group in advantages] == [len(group) for group in groups]
    assert all(abs(sum(group)) < 1e-6 for group in advantages)


Group = st.lists(st.floats(-10, 10).map(lambda value: round(value, 3)), min_size=1, max_size=6)
COMPARING = st.sampled_from(["grpo", "gspo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline"])


@given(COMPARING, st.lists(Group, min_size=1, max_size=4), st.integers(-20, 20))
def test_what_compares_within_a_group_knows_no_shift(name: str, groups: list[list[float]], shift: int) -> None:
    moved = compute(name, [[reward + shift for reward in group] for group in groups])
    assert [close(group) for group in compute(name, groups)] == moved


@given(COMPARING, st.lists(Group, min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_the_order_of_groups_and_samples_does_not_matter(name: str, groups: list[list[float]], random: Random) -> None:
    places = [(at, sample) for at, group in enumerate(groups) for sample in range(len(group))]
    random.shuffle(places)
    table = rollouts([str(at) for at, _ in places], [groups[at][sample] for at, sample in places], [1] * len(places))
    table = table.append_column("loss_mask", pa.array([[1]] * len(places), pa.list_(pa.uint8())))
    found, ordered = advantage_columns(table, name), compute(name, groups)
    assert [row[0] for row in found] == close([ordered[at][sample] for at, sample in places])


def test_columns_follow_the_table_and_the_length_of_each_response() -> None:
    table = rollouts(["b", "a", "b", "a"], [1.0, 5.0, 0.0, 5.0], [2, 1, 3, 0])
    assert advantage_columns(table, "dr_grpo") == [[0.5, 0.5], [0.0], [-0.5, -0.5, -0.5], []]


def test_a_sample_that_was_not_kept_has_no_say() -> None:
    table = rollouts(["a"] * 3, [1.0, 0.0, 9.0], [1, 1, 1]).append_column("kept", [[True, True, False]])
    assert advantage_columns(table, "dr_grpo") == [[0.5], [-0.5], [0.0]]


def test_a_function_of_ones_own_may_give_each_token_its_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_advantage.py").write_text(
        "def ramp(rollouts, params):\n"
        "    return [[params['by'] * i for i in range(len(r))] for r in rollouts['response_token_ids']]\n"
        "def short(rollouts, params):\n    return [[] for _ in range(rollouts.num_rows)]\n"
        "def nan(rollouts, params):\n    return [[float('nan')] for _ in range(rollouts.num_rows)]\n"
        "def one(rollouts):\n    return []\n"
    )
    table = rollouts(["a"], [1.0], [3])
    assert advantage_columns(table, "own_advantage:ramp", by=2) == [[0, 2, 4]]
    with pytest.raises(ValueError, match=r"rows of \[0\] tokens, the responses have \[3\]"):
        advantage_columns(table, "own_advantage:short")
    with pytest.raises(ValueError, match="not finite in row 0"):
        compute("own_advantage:nan", [[1]])
    with pytest.raises(ValueError, match="must take 2 arguments"):
        get_advantage("own_advantage:one")
    sys.modules.pop("own_advantage")


def test_what_cannot_be_meant_is_refused() -> None:
    with pytest.raises(LookupError, match="did you mean 'grpo'"):
        compute("grop", [[1, 2]])
    with pytest.raises(ValueError, match="did you mean 'normalize_std'"):
        compute("grpo", [[1, 2]], normalise_std=True)
    with pytest.raises(ValueError, match="a reward is '1'"):
        compute("grpo", [["1", 2]])  # type: ignore[list-item]
