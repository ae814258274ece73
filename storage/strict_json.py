"""JSON as its standard has it: what Python's parser lets pass and others do not is refused."""

import json
import math
from typing import Any


def parse_json(text: str) -> Any:
    """`text` as JSON, strictly: ValueError for NaN, infinities, numbers that overflow, and a key given twice."""
    return json.loads(text, parse_constant=_no_constant, parse_float=_finite, object_pairs_hook=_unique)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text} is too large")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} is given twice")
    return value
