"""Work that is done again and again beside a run, and that a run never waits for."""

import contextvars
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STOP_SECONDS = 10.0
_log = logging.getLogger(__name__)


@contextmanager
def polled(work: Callable[[], None], every_seconds: float) -> Iterator[None]:
    """Call `work` at once and every so often in a thread, and once more at the end; what it raises is only noted.

    The thread knows the flow run and the settings that Prefect has in the caller's context.
    """
    stopped = threading.Event()

    def once() -> None:
        try:
            work()
        except Exception as error:  # it shows a run, and is no reason to end it
            _log.debug("%s: %s", type(error).__name__, error)

    def run() -> None:
        once()
        while not stopped.wait(every_seconds):
            once()
        once()

    thread = threading.Thread(target=contextvars.copy_context().run, args=(run,), name="polling", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join(STOP_SECONDS)
