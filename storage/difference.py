"""Where two tables, or two sets of numbers, that should be equal first differ, and by how much at most."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

SHOWN = 60  # characters of a value


@dataclass(frozen=True)
class Difference:
    """The first place where what was computed again is not what is stored. `row` is -1 outside of a table."""

    where: str
    row: int
    column: str
    stored: str
    again: str

    def __str__(self) -> str:
        place = f"row {self.row}, column {self.column}" if self.row >= 0 else self.column
        return f"{self.where}: {place}: stored {self.stored}, now {self.again}"


@dataclass(frozen=True)
class Comparison:
    """The first difference beyond the tolerance, if any, and the largest deviation of any number.

    A deviation is relative to the larger of both numbers, or to one where both are smaller: near zero it is absolute.
    """

    first: Difference | None = None
    deviation: float = 0.0

    def then(self, other: "Comparison") -> "Comparison":
        """This and a later comparison as one."""
        return Comparison(self.first or other.first, max(self.deviation, other.deviation))


def compare_tables(where: str, stored: pa.Table, again: pa.Table, *, tolerance: float = 0.0) -> Comparison:
    """Compare two tables of one schema, column by column.

    Numbers may deviate by `tolerance`. Equal NaNs are equal, and so are a null and a null; a number beside none, or
    lists of other lengths, deviate infinitely.
    """
    if stored.num_rows != again.num_rows:
        first = Difference(where, -1, "rows", str(stored.num_rows), str(again.num_rows))
        return Comparison(first, math.inf)
    found = Comparison()
    for name in stored.column_names:
        found = found.then(_compare_column(where, name, stored[name], again[name], tolerance))
    return found


def compare_numbers(
    where: str, stored: Mapping[str, float], again: Mapping[str, float], *, tolerance: float = 0.0
) -> Comparison:
    """Compare named numbers; a name that only one side has is a difference."""
    found = Comparison()
    for name in sorted(stored.keys() | again.keys()):
        one, other = stored.get(name), again.get(name)
        found = found.then(_compare_value(where, -1, name, one, other, tolerance))
    return found


def _compare_column(
    where: str, name: str, stored: pa.ChunkedArray, again: pa.ChunkedArray, tolerance: float
) -> Comparison:
    if stored.equals(again):
        return Comparison()
    found = Comparison()
    for row, (one, other) in enumerate(zip(stored.to_pylist(), again.to_pylist(), strict=True)):
        found = found.then(_compare_value(where, row, name, one, other, tolerance))
    return found


def _compare_value(where: str, row: int, name: str, stored: Any, again: Any, tolerance: float) -> Comparison:
    deviation = _deviation(stored, again)
    if deviation <= tolerance:
        return Comparison(None, deviation)
    position = _first_position(stored, again, tolerance)
    column = name if position is None else f"{name}[{position}]"
    one, other = (stored, again) if position is None else (_item(stored, position), _item(again, position))
    return Comparison(Difference(where, row, column, _shown(one), _shown(other)), deviation)


def _deviation(stored: Any, again: Any) -> float:
    """The largest deviation of two values: 0 when they are equal, infinite when no number says how far."""
    if _is_numeric(stored) and _is_numeric(again) and np.shape(stored) == np.shape(again):
        return float(np.max(_deviations(stored, again), initial=0.0))
    return 0.0 if stored == again else math.inf


def _is_numeric(value: Any) -> bool:
    items = value if isinstance(value, list) else [value]
    return all(isinstance(item, int | float) and not isinstance(item, bool) for item in items)


def _deviations(stored: Any, again: Any) -> np.ndarray:
    one, other = np.asarray(stored, dtype=float), np.asarray(again, dtype=float)
    same = (one == other) | (np.isnan(one) & np.isnan(other))
    with np.errstate(invalid="ignore", divide="ignore"):
        relative = np.abs(one - other) / np.maximum(1.0, np.maximum(np.abs(one), np.abs(other)))
    return np.where(same, 0.0, np.where(np.isfinite(relative), relative, math.inf))


def _first_position(stored: Any, again: Any, tolerance: float) -> int | None:
    """Where two lists part; None for values that are no lists."""
    if not (isinstance(stored, list) and isinstance(again, list)):
        return None
    for position in range(max(len(stored), len(again))):
        if _deviation(_item(stored, position), _item(again, position)) > tolerance:
            return position
    return None


def _item(values: list[Any], position: int) -> Any:
    return values[position] if position < len(values) else None


def _shown(value: Any) -> str:
    text = "nothing" if value is None else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."
