"""Tools that behave and misbehave as told."""

import os
import time
from typing import Any


def add(left: int, right: int) -> int:
    """Add two whole numbers.

    Args:
        left: The first.
        right: The second.
    """
    return left + right


async def later(text: str) -> str:
    """Say a text.

    Args:
        text: What to say.
    """
    return text


def three() -> int:
    """Three."""
    return 3


def hang() -> str:
    """Take for ever."""
    time.sleep(60)
    return ""


def die() -> str:
    """End the process."""
    os._exit(1)


def numbers(count: int) -> list[int]:
    """Count.

    Args:
        count: How far.
    """
    return list(range(count))


def undescribed(left: int, right: Any) -> int:
    """Lacks what a model has to be told."""
    return left
