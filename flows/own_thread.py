"""Long work beside the event loop that nobody waits for once the flow is told to end."""

import asyncio
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


async def in_own_thread(work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """As asyncio.to_thread, but a cancelled flow, and the process with it, ends at once: `work` may end anywhere.

    Reading a million prompts cannot be interrupted, and a flow that is cancelled has half a minute to end.
    """
    done: Future[R] = Future()
    done.set_running_or_notify_cancel()  # whoever stops waiting leaves the work as it is
    context = contextvars.copy_context()

    def run() -> None:
        try:
            done.set_result(context.run(work, *args, **kwargs))
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name=work.__name__, daemon=True).start()
    return await asyncio.wrap_future(done)
