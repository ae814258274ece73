"""What a flow came to, whatever Prefect could be told of it: its own errors take the place of the flow's."""

import asyncio
import functools
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar, Token
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from prefect.context import FlowRunContext
from prefect.exceptions import Abort, ExternalSignal, PrefectSignal, TerminationSignal

from milepost.flows.cancelling import cancel_heard
from milepost.flows.failure import GONE, RunFailed
from milepost.flows.prefect_client import prefect_answers
from milepost.flows.sigterm import Heard, heard

PATIENCE_SECONDS = 600.0

P = ParamSpec("P")
R = TypeVar("R")


@dataclass
class Outcome:
    """What a `recorded` function returned or raised; neither when it was not called or has not ended."""

    done: bool = False
    result: Any = None
    error: BaseException | None = None


_outcome: ContextVar[Outcome] = ContextVar("outcome")
_is_recorded: ContextVar[bool] = ContextVar("is_recorded")


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
        with _inside() as is_outermost, heard() as sigterm:
            try:
                async with cancel_heard(sigterm) if is_outermost else nullcontext():
                    outcome.result = result = await body(*args, **kwargs)
                outcome.done = True
                if is_outermost:
                    await until_told()
            except BaseException as error:  # a cancellation is an outcome too
                outcome.error = signal_in(error) or _reason(sigterm) or unheard(error) or error
                if is_outermost and isinstance(outcome.error, Exception):
                    await until_told()
                if outcome.error is error:
                    raise
                raise outcome.error from None
        return result

    return record


@contextmanager
def _inside() -> Iterator[bool]:
    """Whether no other recorded function is around this one; a step that is not shown runs in its run's own context."""
    token = _is_recorded.set(True)
    try:
        yield token.old_value is Token.MISSING
    finally:
        _is_recorded.reset(token)


def _reason(heard: Heard) -> BaseException | None:
    """Why the body was cancelled, as Prefect knows it."""
    if heard.came:
        return TerminationSignal(signal.SIGTERM)
    return Abort("it was cancelled on its page") if heard.cancelled else None


def unheard(error: BaseException) -> RunFailed | None:
    """What Prefect's console raises when nobody reads it any more: its worker, or a terminal, was killed."""
    return RunFailed(GONE) if isinstance(error, SystemExit) and error.code == 1 else None


async def until_told() -> None:
    """Wait until Prefect can be told how a worker's flow ended, or for long: it would be shown as crashed else."""
    context = FlowRunContext.get()
    flow_run = context.flow_run if context else None
    if flow_run is None or flow_run.deployment_id is None:
        return
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not await prefect_answers() and time.monotonic() < deadline:
        await asyncio.sleep(1.0)


def signal_in(error: BaseException) -> BaseException | None:
    """What Prefect asks a flow to end by, which it knows only as itself.

    Work side by side raises it in a group, and where it came while an error was handled it is that error's context.
    """
    seen: set[int] = set()  # an error that was raised again out of its group has that group as its context
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if isinstance(each, ExternalSignal | PrefectSignal):
            return each
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        waiting += [each.__context__, *(each.exceptions if isinstance(each, BaseExceptionGroup) else ())]
    return None
