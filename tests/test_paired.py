"""Two evaluations side by side: exact tests, intervals, and the gate."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from milepost.tasks.eval_scores import Item
from milepost.tasks.paired import ALL_FLIPS, Paired, mcnemar, paired, sign_flips

SCORES = st.lists(st.integers(-4, 4).map(float), min_size=1, max_size=10)


def found(scores: list[float | None], *, first: int = 0) -> list[Item]:
    return [Item(f"p{first + row}", f"g{row}", [score], [""]) for row, score in enumerate(scores)]


@pytest.mark.parametrize(("improved", "worsened", "p"), [(0, 0, 1.0), (5, 0, 2 / 32), (1, 8, 20 / 512), (4, 4, 1.0)])
def test_mcnemars_p_is_twice_the_smaller_tail_of_a_fair_coin(improved: int, worsened: int, p: float) -> None:
    assert mcnemar(improved, worsened) == pytest.approx(p)


def test_three_equal_differences_have_the_two_of_eight_signs_that_are_as_extreme() -> None:
    assert sign_flips([0.5, 0.5, 0.5]) == pytest.approx(2 / 8)


def test_differences_that_cancel_say_nothing() -> None:
    assert sign_flips([1.0, -1.0]) == 1.0


@given(SCORES)
def test_the_sign_of_all_differences_does_not_matter(differences: list[float]) -> None:
    assert sign_flips(differences) == sign_flips([-value for value in differences])


def test_drawn_flips_agree_with_counted_ones_and_are_the_same_each_time() -> None:
    """Of 16 differences of 1, 12 up and 4 down, a fair coin is as far off in 2 * 2517 of 65536 cases."""
    differences = [1.0] * 12 + [-1.0] * 4
    assert len(differences) > ALL_FLIPS
    assert sign_flips(differences) == sign_flips(differences) == pytest.approx(2 * 2517 / 65536, abs=0.01)


def test_right_and_wrong_answers_are_compared_by_mcnemar() -> None:
    compared = paired("d", found([0, 0, 0, 0, 0, 1]), found([1, 1, 1, 1, 1, 1]))
    assert (compared.test, compared.p) == ("McNemar, exact", pytest.approx(2 / 32))
    assert (compared.before, compared.after, compared.difference) == (pytest.approx(1 / 6), 1.0, pytest.approx(5 / 6))
    assert compared.low == pytest.approx(5 / 6 - 1.959964 * (1 / 6**0.5) / 6**0.5, abs=1e-6)


def test_items_in_only_one_of_them_are_counted_and_left_out() -> None:
    compared = paired("d", found([1.0, None, 0.0]), found([0.5, 1.0], first=0))
    assert (compared.items, compared.unmatched, compared.test) == (1, 2, "sign flips")
    assert (compared.difference, compared.low, compared.p) == (-0.5, None, 1.0)


def test_prompts_that_repeat_are_compared_in_their_order() -> None:
    twice = [Item("p", "g0", [0.0], [""]), Item("p", "g1", [1.0], [""])]
    assert paired("d", twice, twice).items == 2


def test_evaluations_without_a_common_item_are_refused() -> None:
    with pytest.raises(ValueError, match="the two evaluations of 'd' have no item in common"):
        paired("d", found([1.0]), found([1.0], first=7))


def test_the_gate_needs_a_drop_that_is_large_and_one_that_is_not_chance() -> None:
    def fell(by: float, p: float) -> bool:
        return Paired("d", 100, 0, 0.5, 0.5 - by, -by, None, None, p, "sign flips").dropped(0.02)

    assert fell(0.05, 0.01)
    assert not fell(0.05, 0.2) and not fell(0.01, 0.001) and not fell(-0.05, 0.001) and not fell(0.02, 0.001)
