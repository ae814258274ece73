"""Cancel of a flow run that no worker ends: its worker was killed, lost its server for a while, or there is none.

A worker that lives ends the process of its flow run by SIGTERM, at once, so a run looks twice before it ends itself.
"""

import asyncio
import contextvars
import logging
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.context import FlowRunContext
from prefect.runtime import flow_run

from milepost.flows import crashed
from milepost.flows.prefect_client import brief_client
from milepost.flows.sigterm import Heard

LOOK_SECONDS = 5.0
_log = logging.getLogger(__name__)


@asynccontextmanager
async def cancel_heard(heard: Heard) -> AsyncIterator[None]:
    """Cancel the task inside, and say so in `heard`, when its flow run was cancelled and no signal has come of it.

    For the outermost flow of a process, which is shown as cancelled, with all below it, once its work has ended.
    """
    context, task = FlowRunContext.get(), asyncio.current_task()
    if context is None or context.flow_run is None:
        yield
        return
    assert task is not None
    ended, loop = threading.Event(), asyncio.get_running_loop()

    def watch(flow_run_id: UUID) -> None:
        looks = 0
        with brief_client() as client:
            while looks < 2:
                if ended.wait(LOOK_SECONDS):
                    return
                looks += is_cancelling(client, flow_run_id)
        if not heard.came and not ended.is_set():
            heard.cancelled = True
            loop.call_soon_threadsafe(task.cancel)

    arguments = (watch, context.flow_run.id)
    threading.Thread(target=contextvars.copy_context().run, args=arguments, name="cancel", daemon=True).start()
    try:
        yield
    except BaseException:
        if heard.cancelled:
            crashed.mark_cancelled()
        raise
    finally:
        ended.set()


def is_cancelling(client: SyncPrefectClient, flow_run_id: UUID) -> bool:
    """Whether somebody has pressed Cancel; False where Prefect does not answer."""
    try:
        state = client.read_flow_run(flow_run_id).state
    except Exception as error:  # whatever the server answers: the next look asks again
        _log.debug("whether %s was cancelled is not known: %s", flow_run_id, error)
        return False
    return state is not None and state.is_cancelling()


def this_is_cancelling() -> bool:
    """Whether Cancel was pressed on the page of the flow run that calls this; a busy server is asked again."""
    if flow_run.id is None:
        return False
    with get_client(sync_client=True) as client:
        return is_cancelling(client, UUID(flow_run.id))
