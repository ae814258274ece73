"""SIGTERM ends the work of a flow, also where the exception that Prefect raises for it is lost."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable

import pytest
from prefect.exceptions import TerminationSignal
from prefect.utilities.engine import capture_sigterm

from milepost.flows import outcome
from milepost.flows.failure import RunFailed
from milepost.flows.outcome import recorded, watched


def ended(body: Callable[[], Awaitable[None]]) -> BaseException | None:
    """What `body` is recorded to have ended by, under Prefect's own handler."""
    with capture_sigterm(), watched() as found:
        before = signal.getsignal(signal.SIGTERM)
        with pytest.raises(BaseException) as raised:
            asyncio.run(recorded(body)())  # type: ignore[arg-type]
        assert signal.getsignal(signal.SIGTERM) is before and raised.value is found.error
    return found.error


def test_a_console_that_nobody_reads_any_more_is_said_as_such() -> None:
    async def body() -> None:
        raise SystemExit(1)  # what rich makes of a pipe whose reader was killed

    error = ended(body)
    assert isinstance(error, RunFailed) and "whoever started this process is gone" in str(error)


def test_only_the_outermost_of_flows_inside_flows_waits_until_prefect_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[str] = []

    async def told() -> None:
        ends.append("told")

    @recorded
    async def inner() -> None:
        ends.append("inner")

    @recorded
    async def outer() -> None:
        await inner()
        ends.append("outer")

    monkeypatch.setattr(outcome, "until_told", told)
    asyncio.run(outer())
    assert ends == ["inner", "outer", "told"]


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_that_came_inside_a_callback_of_the_event_loop_is_not_lost() -> None:
    async def body() -> None:
        asyncio.get_running_loop().call_soon(terminate)  # what is raised in a callback is logged and dropped
        await asyncio.sleep(60)

    assert isinstance(ended(body), TerminationSignal)


def test_a_signal_that_came_inside_another_task_is_not_lost() -> None:
    async def interrupted() -> None:
        try:
            terminate()
        except TerminationSignal:
            raise ValueError("what the library makes of it") from None

    async def body() -> None:
        await asyncio.wait([asyncio.create_task(interrupted())])
        await asyncio.sleep(60)

    assert isinstance(ended(body), TerminationSignal)


def test_an_error_that_took_the_place_of_the_signal_is_the_signal() -> None:
    async def body() -> None:
        try:
            async with asyncio.TaskGroup():
                terminate()
        finally:
            raise ValueError("while it was handled")

    assert isinstance(ended(body), TerminationSignal)


def test_an_error_of_a_group_that_is_raised_again_stays_that_error() -> None:
    async def body() -> None:
        try:
            raise ExceptionGroup("side by side", [ValueError("first")])
        except ExceptionGroup as group:
            raise group.exceptions[0] from None

    assert isinstance(ended(body), ValueError)


def test_bodies_inside_bodies_hear_the_signal_together() -> None:
    heard_inside: list[str] = []

    @recorded
    async def inner() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            heard_inside.append("ended")

    async def body() -> None:
        asyncio.get_running_loop().call_soon(terminate)
        await inner()

    assert isinstance(ended(body), TerminationSignal) and heard_inside == ["ended"]
