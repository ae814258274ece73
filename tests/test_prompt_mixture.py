"""Several prompt sets served as one: quotas, epochs of each set, and the account of a run that has them."""

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from milepost.storage.accounting import epoch_accounting
from milepost.storage.prompt_mixture import Share, counts, serve
from milepost.storage.prompt_order import Cursor, take
from milepost.storage.verify import verify

from .bench.made_run import MadeRun, add_step, begin_run

SHARES = st.lists(
    st.tuples(st.integers(1, 9), st.floats(0.01, 100).map(lambda weight: round(weight, 2))), min_size=1, max_size=5
).map(lambda sets: [Share(f"s{number}", rows, weight) for number, (rows, weight) in enumerate(sets)])


def size(shares: list[Share]) -> int:
    return sum(share.rows for share in shares)


@given(SHARES, st.integers(0, 300))
def test_counts_sum_to_the_servings_and_never_shrink(shares: list[Share], served: int) -> None:
    now, next_ = counts(served, shares), counts(served + 1, shares)
    assert sum(now) == served and sum(next_) == served + 1
    assert all(before <= after for before, after in zip(now, next_, strict=True))


@given(SHARES, st.integers(0, 2000))
def test_no_set_is_two_prompts_from_its_share(shares: list[Share], served: int) -> None:
    whole = sum(share.weight for share in shares)
    for share, count in zip(shares, counts(served, shares), strict=True):
        assert abs(count - served * share.weight / whole) < 2


def test_a_step_has_exactly_its_quotas_where_the_weights_divide_it() -> None:
    shares = [Share("a", 100, 0.7), Share("b", 10, 0.2), Share("c", 7, 0.1)]
    cursor = Cursor()
    for _ in range(30):
        before = counts(cursor.served, shares)
        _, cursor = serve(20, cursor, size=117, seed=1, shares=shares)
        assert [now - then for now, then in zip(counts(cursor.served, shares), before, strict=True)] == [14, 4, 2]


@given(SHARES, st.integers(0, 9), st.lists(st.integers(0, 40), max_size=6), st.booleans())
def test_any_cut_serves_the_same_prompts_and_leaves_the_same_cursor(
    shares: list[Share], seed: int, cuts: list[int], shuffle: bool
) -> None:
    cursor, served = Cursor(), Counter()
    for count in cuts:
        picks, cursor = serve(count, cursor, size=size(shares), seed=seed, shuffle=shuffle, shares=shares)
        served.update(picks)
    whole, end = serve(sum(cuts), Cursor(), size=size(shares), seed=seed, shuffle=shuffle, shares=shares)
    assert (served, cursor) == (Counter(whole), end)


@given(SHARES, st.integers(0, 9), st.integers(0, 200))
def test_each_set_serves_every_prompt_once_in_each_of_its_epochs(shares: list[Share], seed: int, count: int) -> None:
    picks, _ = serve(count, Cursor(), size=size(shares), seed=seed, shares=shares)
    first = 0
    for share, served in zip(shares, counts(count, shares), strict=True):
        own = Counter((index - first, epoch) for index, epoch in picks if first <= index < first + share.rows)
        assert sum(own.values()) == served and max(own.values(), default=1) == 1
        assert {(row, epoch) for epoch in range(served // share.rows) for row in range(share.rows)} <= own.keys()
        first += share.rows


def test_the_order_of_a_set_is_its_own_whatever_is_beside_it() -> None:
    def order(*names: str) -> list[int]:
        shares = [Share(name, 8, 1.0) for name in names]
        first = 8 * names.index("b")
        picks, _ = serve(8 * len(names), Cursor(), size=8 * len(names), seed=3, shares=shares)
        return [index - first for index, epoch in picks if first <= index < first + 8 and epoch == 0]

    assert order("a", "b") == order("b", "c", "d")


def test_every_shard_of_a_step_has_some_of_each_set() -> None:
    shares = [Share("a", 64, 1.0), Share("b", 64, 1.0)]
    picks, _ = serve(64, Cursor(), size=128, seed=0, shares=shares)
    for shard in range(4):
        assert 0 < sum(index < 64 for index, _ in picks[shard::4]) < 16


def test_the_order_is_the_one_it_has_always_been() -> None:
    shares = [Share("a", 5, 3.0), Share("b", 2, 1.0)]
    picks, cursor = serve(8, Cursor(), size=7, seed=0, shares=shares)
    assert picks == [(4, 0), (5, 0), (0, 0), (3, 0), (2, 0), (1, 0), (6, 0), (3, 1)]
    assert cursor == Cursor(1, 1, 8)


def test_a_single_set_is_served_as_without_a_mixture() -> None:
    assert serve(7, Cursor(0, 3, 3), size=5, seed=2) == take(7, Cursor(0, 3, 3), size=5, seed=2)


def test_a_cursor_of_other_sets_is_refused() -> None:
    with pytest.raises(ValueError, match="it was made for other prompt sets"):
        serve(1, Cursor(0, 3, 4), size=5, seed=0, shares=[Share("a", 5, 1.0)])
    with pytest.raises(ValueError, match="it was made for other prompt sets"):
        serve(1, Cursor(), size=6, seed=0, shares=[Share("a", 5, 1.0)])


MIXED = (Share("sums", 6, 3.0, too_long=1), Share("words", 3, 1.0, bad_lines=2))


def mixed(folder: Path, steps: int) -> MadeRun:
    made = begin_run(str(folder), shares=MIXED)
    for step in range(steps):
        add_step(made, step)
    return made


def test_each_set_has_an_account_of_its_own_epochs(tmp_path: Path) -> None:
    """Four prompts a step, three of them sums: after three steps nine sums of six, and all three words."""
    found = epoch_accounting(mixed(tmp_path, 3).folder)
    assert {epoch: own["prompts"] for epoch, own in found.items()} == {("sums", 0): 7, ("sums", 1): 7, ("words", 0): 5}
    for own in found.values():
        assert sum(count for name, count in own.items() if name != "prompts") == own["prompts"]
    assert found["sums", 1]["pending"] == 3 and found["words", 0]["malformed"] == 2


def test_a_run_of_several_sets_verifies_and_a_swapped_prompt_is_found(tmp_path: Path) -> None:
    made = mixed(tmp_path, 3)
    assert verify(made.folder).faults == []
    record = Path(made.folder.record)
    record.write_text(record.read_text().replace('"weight": 3.0', '"weight": 2.0'))
    assert any("was due" in fault.problem for fault in verify(made.folder).faults)
