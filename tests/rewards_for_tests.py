"""Rewards that behave and misbehave as told."""

import time
from typing import Any


def parity(sample: Any) -> float:
    """Depends on the response alone, and differs inside most groups."""
    return float(len(sample.response) % 2)


def always_one(sample: Any) -> float:
    return 1.0


def hang_or_raise(sample: Any) -> float:
    """Hangs on the prompt 3+1=, raises on 4+1=."""
    if sample.prompt == "3+1=":
        time.sleep(60)
    if sample.prompt == "4+1=":
        raise RuntimeError("no verdict")
    return 1.0
