"""What a flow came to, whatever Prefect could be told of it: its own errors take the place of the flow's."""

import functools
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from prefect.exceptions import ExternalSignal, PrefectSignal

P = ParamSpec("P")
R = TypeVar("R")


@dataclass
class Outcome:
    """What a `recorded` function returned or raised; neither when it was not called or has not ended."""

    done: bool = False
    result: Any = None
    error: BaseException | None = None


_outcome: ContextVar[Outcome] = ContextVar("outcome")


@contextmanager
def watched() -> Iterator[Outcome]:
    """The outcome of the `recorded` function that is called inside."""
    token = _outcome.set(Outcome())
    try:
        yield _outcome.get()
    finally:
        _outcome.reset(token)


def recorded(body: Callable[P, Awaitable[R]]) -> Callable[P, Awaitable[R]]:
    """Let whoever calls the flow around `body` see how `body` itself ended."""

    @functools.wraps(body)
    async def record(*args: P.args, **kwargs: P.kwargs) -> R:
        outcome = _outcome.get(Outcome())
        try:
            outcome.result = result = await body(*args, **kwargs)
        except BaseExceptionGroup as group:
            outcome.error = _signal_in(group) or group
            raise outcome.error from None
        except BaseException as error:  # a cancellation is an outcome too
            outcome.error = error
            raise
        outcome.done = True
        return result

    return record


def _signal_in(group: BaseExceptionGroup[BaseException]) -> BaseException | None:
    """What Prefect asks a flow to end by, which it knows only as itself: work side by side raises groups."""
    for error in group.exceptions:
        found = _signal_in(error) if isinstance(error, BaseExceptionGroup) else error
        if isinstance(found, ExternalSignal | PrefectSignal):
            return found
    return None
