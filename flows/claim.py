"""The claim of one process on a run, which the flow run in Prefect tells of."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from prefect import get_run_logger
from prefect.exceptions import Pause
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_URL

from milepost.flows import crashed
from milepost.flows.cancelling import this_is_cancelling
from milepost.flows.outcome import signal_in
from milepost.flows.run_status import CANCELLED, PAUSED, QUEUED, resume_command
from milepost.storage import files
from milepost.storage.lease import Holder, hold, holder, note
from milepost.storage.runs import RunFolder

HAND_OVER_SECONDS = 1800.0  # no stage has a shorter deadline
_LOOK_SECONDS = 1.0


@asynccontextmanager
async def claimed(folder: RunFolder, root: str, *, go_on_with: str = "") -> AsyncIterator[int]:
    """Hold the run, and yield the fence of this claim; flow runs of dead processes that had it are shown as crashed.

    `go_on_with` is what to do when this process dies too, if not to resume the run. A pause is noted beside the claim,
    and one that is resumed while its process is still in the stage it was paused in waits for that.
    """
    await _handed_over(folder)
    with _nothing_if_refused(folder), hold(folder) as lease:
        command = go_on_with or resume_command(folder, root)
        await asyncio.to_thread(crashed.record_owner, folder.uri, lease.fence, command)
        await asyncio.to_thread(crashed.mark_superseded, folder.uri, lease.fence)
        try:
            yield lease.fence
        except BaseException as error:
            if isinstance(signal_in(error), Pause):
                api = str(PREFECT_API_URL.value() or "")
                note(folder.uri, lease.fence, PAUSED, flow_run=str(flow_run.id or ""), api=api)
                crashed.end_suspended()
            elif this_is_cancelling():  # nothing is awaited: the task may be cancelled for good
                note(folder.uri, lease.fence, CANCELLED)
            raise


@contextmanager
def _nothing_if_refused(folder: RunFolder) -> Iterator[None]:
    """A run that was refused before it had a record leaves no folder of its name."""
    try:
        yield
    finally:
        if files.names(folder.uri) == ["lease"] and holder(folder.uri) is None:
            files.remove_folder(folder.uri)


async def _handed_over(folder: RunFolder) -> None:
    """Wait while the process that this flow run had before still has the run; it ends with the stage that it is in."""
    found = _still_with_the_one_before(folder)
    if found:
        said = "%s was suspended and ends with the stage that it is in: the run goes on here once it has"
        get_run_logger().info(said, found.owner)  # the run's own log is not there yet
    deadline = time.monotonic() + HAND_OVER_SECONDS
    while found and time.monotonic() < deadline:
        await asyncio.sleep(_LOOK_SECONDS)
        found = _still_with_the_one_before(folder)


def _still_with_the_one_before(folder: RunFolder) -> Holder | None:
    found = holder(folder.uri)
    return found if found and found.works and found.owner == crashed.owner_before() else None


@contextmanager
def queued(folder: RunFolder, fence: int) -> Iterator[None]:
    """Inside, the run waits for its turn, and says so."""
    note(folder.uri, fence, QUEUED)
    try:
        yield
    finally:
        note(folder.uri, fence, "")
