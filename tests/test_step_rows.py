"""Numbers for people who watch."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from milepost.flows.step_rows import BLOCKS, duration, figure, sparkline, thinned

NUMBERS = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300)


@given(values=NUMBERS, count=st.integers(1, 100))
def test_thinning_keeps_the_range_and_the_count(values: list[float], count: int) -> None:
    found = thinned(values, count)
    assert len(found) == min(len(values), count)
    assert min(values) - 1e-6 <= min(found) and max(found) <= max(values) + 1e-6


def test_thinning_takes_the_means_of_equal_parts() -> None:
    assert thinned([1.0, 3.0, 5.0, 9.0], 2) == [2.0, 7.0]


@given(values=NUMBERS)
def test_a_sparkline_is_one_line_from_lowest_to_highest(values: list[float]) -> None:
    shown = sparkline(values)
    assert len(shown) == min(len(values), 60) and set(shown) <= set(BLOCKS)


def test_a_sparkline_of_a_rise() -> None:
    assert sparkline([0.0, 1.0]) == BLOCKS[0] + BLOCKS[-1]
    assert sparkline([]) == "" and sparkline([math.nan]) == ""


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, ""), (-1, "0 s"), (59.9, "59 s"), (60, "1 m 0 s"), (3725, "1 h 2 m"), (90000, "1 d 1 h")],
)
def test_a_duration_has_its_two_largest_units(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def test_a_number_that_is_not_known_is_left_empty() -> None:
    assert [figure(None), figure(math.nan), figure(1234.5, 0), figure(0.25)] == ["", "", "1,234", "0.250"]
