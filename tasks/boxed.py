"""`boxed_NAME`: any reward, of what is in the last box of a response."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from milepost.tasks.extraction import after_thinking, last_boxed
from milepost.tasks.verdict import Sample


def boxed(reward: Callable[..., Any]) -> Callable[..., Any]:
    """The reward, given the content of the last box after the thinking as the response; without a box, nothing.

    A reward with an option `boxed_only` finds the box itself: then it is that option.
    """
    if "boxed_only" in inspect.signature(reward).parameters:
        return functools.partial(reward, boxed_only=True)

    @functools.wraps(reward)
    def of_box(given: Any, **options: Any) -> Any:
        return reward(list(map(_cut, given)) if isinstance(given, list) else _cut(given), **options)

    return of_box


def _cut(sample: Sample) -> Sample:
    return replace(sample, response=last_boxed(after_thinking(sample.response)) or "")
