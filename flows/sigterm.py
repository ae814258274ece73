"""SIGTERM while a flow works: it is heard, whatever becomes of what Prefect raises for it.

Prefect's handler raises wherever the interpreter happens to be. Inside a callback of the event loop that is logged and
dropped; inside code that handles an error, another error takes its place. The event loop is told of the signal in any
case.
"""

import asyncio
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

LOST_SECONDS = 3.0  # what was raised has ended the flow's waiting by then, if it was not lost


@dataclass
class Heard:
    """Whether the signal came, and whether the flow run was cancelled on its page without one."""

    came: bool = False
    cancelled: bool = False


_hearing: ContextVar[Heard] = ContextVar("hearing")


@contextmanager
def heard() -> Iterator[Heard]:
    """Hear the signal; the task inside is cancelled `LOST_SECONDS` later, if it is still at work.

    Flows inside flows hear with the outermost, and threads that cannot be told of signals hear nothing.
    """
    outer = _hearing.get(None)
    if outer or threading.current_thread() is not threading.main_thread():
        yield outer or Heard()
        return
    found = Heard()
    token = _hearing.set(found)
    try:
        with _told(found):
            yield found
    finally:
        _hearing.reset(token)


@contextmanager
def _told(found: Heard) -> Iterator[None]:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    cancels: list[asyncio.TimerHandle] = []

    def hear() -> None:
        found.came = True
        cancels.append(loop.call_later(LOST_SECONDS, task.cancel))

    before = signal.getsignal(signal.SIGTERM)
    loop.add_signal_handler(signal.SIGTERM, hear)
    signal.signal(signal.SIGTERM, before)  # the loop took its place, and Prefect looks whether its own is there
    try:
        yield
    finally:
        for cancel in cancels:
            cancel.cancel()
        before = signal.getsignal(signal.SIGTERM)
        loop.remove_signal_handler(signal.SIGTERM)
        signal.signal(signal.SIGTERM, before)
