"""The claim of one process on a run, which the flow run in Prefect tells of."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from milepost.flows import crashed
from milepost.flows.run_status import resume_command
from milepost.storage.lease import hold
from milepost.storage.runs import RunFolder


@asynccontextmanager
async def claimed(folder: RunFolder, root: str) -> AsyncIterator[int]:
    """Hold the run, and yield the fence of this claim; flow runs of dead processes that had it are shown as crashed."""
    with hold(folder) as lease:
        await asyncio.to_thread(crashed.record_owner, folder.uri, lease.fence, resume_command(folder, root))
        await asyncio.to_thread(crashed.mark_superseded, folder.uri, lease.fence)
        yield lease.fence
