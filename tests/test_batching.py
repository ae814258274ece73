"""Packing and balancing use every sample once, whatever the lengths."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from milepost.engines.batching import balance, pack, pack_padded

lengths_lists = st.lists(st.integers(0, 50), max_size=60)


def flat(groups: list[list[int]]) -> list[int]:
    return sorted(index for group in groups for index in group)


def test_packing_by_hand() -> None:
    assert pack([700, 600, 300, 300, 100], 1000) == [[0, 2], [1, 3, 4]]
    assert pack([], 10) == []
    assert pack([30, 5, 5], 10) == [[0], [1, 2]]


@given(lengths_lists, st.integers(1, 60))
def test_a_pack_holds_every_index_once_and_keeps_to_the_budget(lengths: list[int], budget: int) -> None:
    bins = pack(lengths, budget)
    assert flat(bins) == list(range(len(lengths)))
    assert all(len(one) == 1 or sum(lengths[index] for index in one) <= budget for one in bins)
    assert bins == pack(lengths, budget)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60))
def test_no_two_packs_would_have_fitted_into_one(lengths: list[int]) -> None:
    sums = sorted(sum(lengths[index] for index in one) for one in pack(lengths, 50))
    assert len(sums) < 2 or sums[0] + sums[1] > 50


@given(lengths_lists, st.integers(1, 200))
def test_a_padded_pack_counts_its_padding(lengths: list[int], budget: int) -> None:
    bins = pack_padded(lengths, budget)
    assert flat(bins) == list(range(len(lengths)))
    assert all(len(one) == 1 or len(one) * max(lengths[index] for index in one) <= budget for one in bins)


def test_balancing_by_hand() -> None:
    assert balance([8, 7, 6, 5, 4], 2) == [[0, 2], [1, 3, 4]]
    assert balance([], 3) == [[], [], []]
    assert balance([5], 2) == [[], [0]]


@given(lengths_lists, st.integers(1, 8))
def test_parts_differ_by_at_most_the_longest_sample(lengths: list[int], parts: int) -> None:
    groups = balance(lengths, parts)
    assert len(groups) == parts
    assert flat(groups) == list(range(len(lengths)))
    sums = [sum(lengths[index] for index in group) for group in groups]
    assert max(sums) - min(sums) <= max(lengths, default=0)


@pytest.mark.parametrize("parts", [2, 8, 64])
def test_thousands_of_lengths_are_balanced_to_a_thousandth(parts: int) -> None:
    draw = random.Random(0)
    lengths = [min(8192, 1 + int(draw.lognormvariate(6.5, 0.9))) for _ in range(10_000)]
    groups = balance(lengths, parts)
    sums = [sum(lengths[index] for index in group) for group in groups]
    assert flat(groups) == list(range(len(lengths)))
    assert max(sums) * parts <= 1.001 * sum(sums)


@given(lengths_lists, st.integers(1, 8))
def test_no_part_is_empty_while_there_are_enough_samples(lengths: list[int], parts: int) -> None:
    filled = sum(bool(group) for group in balance(lengths, parts))
    assert filled == min(parts, len(lengths))


def test_bad_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="max_tokens is 0"):
        pack([1], 0)
    with pytest.raises(ValueError, match="a length is -1"):
        pack([-1], 5)
    with pytest.raises(ValueError, match="parts is 0"):
        balance([1], 0)
