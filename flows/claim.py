"""The claim of one process on a run, which the flow run in Prefect tells of."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from prefect.exceptions import Pause

from milepost.flows import crashed
from milepost.flows.outcome import signal_in
from milepost.flows.run_status import PAUSED, QUEUED, resume_command
from milepost.storage.lease import hold, note
from milepost.storage.runs import RunFolder


@asynccontextmanager
async def claimed(folder: RunFolder, root: str, *, go_on_with: str = "") -> AsyncIterator[int]:
    """Hold the run, and yield the fence of this claim; flow runs of dead processes that had it are shown as crashed.

    `go_on_with` is what to do when this process dies too, if not to resume the run. A pause is noted beside the claim.
    """
    with hold(folder) as lease:
        command = go_on_with or resume_command(folder, root)
        await asyncio.to_thread(crashed.record_owner, folder.uri, lease.fence, command)
        await asyncio.to_thread(crashed.mark_superseded, folder.uri, lease.fence)
        try:
            yield lease.fence
        except BaseException as error:
            if isinstance(signal_in(error), Pause):
                note(folder.uri, lease.fence, PAUSED)
            raise


@contextmanager
def queued(folder: RunFolder, fence: int) -> Iterator[None]:
    """Inside, the run waits for its turn, and says so."""
    note(folder.uri, fence, QUEUED)
    try:
        yield
    finally:
        note(folder.uri, fence, "")
