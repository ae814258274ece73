"""The serving order: the same however it is cut, complete in every epoch, and fixed for ever."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from milepost.storage.parameters import DataSection
from milepost.storage.prompt_order import Cursor, permutation, prompt_table, take
from milepost.storage.prompts import PromptSet, load_prompts
from milepost.storage.schema import PROMPTS, check

SIZES = st.integers(1, 40)
EXPECTED_FIRST = (3, 4, 2, 6, 0, 7, 1, 5)
EXPECTED_SECOND = (3, 0, 4, 6, 5, 2, 1, 7)


class Characters:
    def render(self, messages: Any) -> list[int]:
        return [1]

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]


def small_set(folder: Path, count: int) -> PromptSet:
    path = folder / "set.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"p{number}"}) + "\n" for number in range(count)))
    return load_prompts(DataSection(path=str(path)), Characters(), context_length=10)


@given(SIZES, st.integers(0, 9), st.lists(st.integers(0, 50), max_size=8), st.booleans())
def test_any_cut_of_the_sequence_serves_the_same_order(size: int, seed: int, counts: list[int], shuffle: bool) -> None:
    cursor, served = Cursor(), []
    for count in counts:
        picks, cursor = take(count, cursor, size=size, seed=seed, shuffle=shuffle)
        served += picks
    assert (served, cursor) == take(sum(counts), Cursor(), size=size, seed=seed, shuffle=shuffle)
    assert cursor.served == sum(counts) == cursor.epoch * size + cursor.position


@given(SIZES, st.integers(0, 9), st.integers(1, 4))
def test_each_epoch_serves_every_prompt_exactly_once(size: int, seed: int, epochs: int) -> None:
    picks, cursor = take(size * epochs, Cursor(), size=size, seed=seed)
    assert Counter(picks) == Counter((index, epoch) for epoch in range(epochs) for index in range(size))
    assert cursor == Cursor(epochs, 0, size * epochs)


def test_a_batch_larger_than_the_set_wraps_as_often_as_needed() -> None:
    picks, cursor = take(12, Cursor(), size=5, seed=0)
    counts = Counter(index for index, _ in picks)
    assert len(picks) == 12 and min(counts.values()) >= 2
    assert cursor == Cursor(epoch=2, position=2, served=12)


def test_without_shuffle_the_files_order_is_kept() -> None:
    picks, _ = take(5, Cursor(), size=3, seed=7, shuffle=False)
    assert picks == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1)]


def test_the_order_is_the_one_it_has_always_been() -> None:
    assert permutation(8, 0, 0) == EXPECTED_FIRST
    assert permutation(8, 0, 1) == EXPECTED_SECOND
    assert permutation(8, 1, 0) not in (EXPECTED_FIRST, EXPECTED_SECOND)


def test_no_position_is_favoured_by_the_shuffle() -> None:
    firsts = Counter(permutation(4, seed, 0)[0] for seed in range(4000))
    assert all(850 < firsts[index] < 1150 for index in range(4))


@pytest.mark.parametrize(
    ("count", "cursor", "size", "message"),
    [
        (-1, Cursor(), 3, "cannot take -1 prompts"),
        (1, Cursor(), 0, "a set of 0 prompts"),
        (1, Cursor(0, 3, 3), 3, "the cursor is at prompt 3 of a set of 3: it was made for another prompt set"),
    ],
)
def test_what_cannot_be_served_is_refused(count: int, cursor: Cursor, size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        take(count, cursor, size=size, seed=0)


def test_servings_become_a_table_whose_groups_are_unique_in_a_run(tmp_path: Path) -> None:
    prompts = small_set(tmp_path, 3)
    picks, cursor = take(4, Cursor(), size=3, seed=0)
    first = prompt_table(prompts.table, picks, step=0, round_=0)
    again = prompt_table(prompts.table, take(4, cursor, size=3, seed=0)[0], step=0, round_=1)
    assert check(first, PROMPTS)["group_id"].to_pylist()[:2] == ["000000-0-0000", "000000-0-0001"]
    assert first["epoch"].to_pylist() == [0, 0, 0, 1]
    assert first["row"].to_pylist() == [index for index, _ in picks]
    assert len({*first["group_id"].to_pylist(), *again["group_id"].to_pylist()}) == 8


def test_a_step_without_prompts_is_an_empty_table(tmp_path: Path) -> None:
    assert prompt_table(small_set(tmp_path, 1).table, [], step=0, round_=0).num_rows == 0
