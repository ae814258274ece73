"""What is said of two tables that should be equal."""

import math

import pyarrow as pa
import pytest

from milepost.storage.difference import compare_numbers, compare_tables


def one_row(**columns: object) -> pa.Table:
    return pa.table({name: [value] for name, value in columns.items()})


def test_equal_tables_have_no_difference_and_no_deviation() -> None:
    table = pa.table({"text": ["a", None], "values": [[1.0, float("nan")], None]})
    found = compare_tables("score", table, table)
    assert (found.first, found.deviation) == (None, 0.0)


def test_the_first_difference_names_row_column_position_and_both_values() -> None:
    stored = pa.table({"id": ["a", "b"], "logprobs": [[-1.0, -2.0], [-3.0, -4.0]]})
    again = pa.table({"id": ["a", "b"], "logprobs": [[-1.0, -2.0], [-3.0, -5.0]]})
    found = compare_tables("optimize of step 3", stored, again)
    assert str(found.first) == "optimize of step 3: row 1, column logprobs[1]: stored -4.0, now -5.0"
    assert found.deviation == pytest.approx(0.2)  # |4 - 5| / 5


def test_a_deviation_within_the_tolerance_is_told_and_is_no_difference() -> None:
    found = compare_tables("optimize", one_row(value=1.0), one_row(value=1.01), tolerance=0.02)
    assert found.first is None
    assert found.deviation == pytest.approx(0.01 / 1.01)


@pytest.mark.parametrize(
    ("stored", "again"),
    [(1.0, None), (1.0, float("nan")), ([1.0], [1.0, 2.0]), ("a", "b"), (True, False), (1.0, math.inf)],
)
def test_what_no_number_measures_deviates_infinitely(stored: object, again: object) -> None:
    found = compare_tables("score", one_row(value=stored), one_row(value=again), tolerance=0.5)
    assert found.first is not None
    assert found.deviation == math.inf


def test_another_number_of_rows_is_the_difference() -> None:
    found = compare_tables("filter", pa.table({"a": [1, 2]}), pa.table({"a": [1]}))
    assert str(found.first) == "filter: rows: stored 2, now 1"


def test_a_metric_that_only_one_side_has_is_a_difference() -> None:
    found = compare_numbers("optimize", {"loss": 0.5, "kl": 0.1}, {"loss": 0.5})
    assert str(found.first) == "optimize: kl: stored 0.1, now nothing"


def test_a_long_value_is_shown_by_its_beginning() -> None:
    found = compare_tables("score", one_row(text="a" * 500), one_row(text="b" * 500))
    assert found.first is not None
    assert len(found.first.stored) == 60
