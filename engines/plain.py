"""Values of Python that can be compared from afar: as JSON, and equal exactly when the values are."""

import json
import math
from typing import Any


def plain(value: Any) -> Any:
    """A value of JSON, a set or bytes as JSON that equals another's exactly when the two values are equal.

    A tuple is a list, and a whole float an integer. TypeError for a value of another kind.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, float):
        return int(value) if math.isfinite(value) and value.is_integer() else float(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return {"set": sorted((plain(item) for item in value), key=json.dumps)}
    if isinstance(value, dict):
        return {"dict": sorted(([plain(key), plain(item)] for key, item in value.items()), key=json.dumps)}
    if isinstance(value, bytes | bytearray):
        return {"bytes": value.hex()}
    if hasattr(value, "tolist"):  # numpy
        return plain(value.tolist())
    raise TypeError(f"{type(value).__name__} is not a plain value")
