"""Runs take turns: a concurrency limit of the Prefect server has a slot for each GPU, or core, of the engines.

`milepost deploy` creates the limit; where there is none, nobody waits. The slots of a run whose process is killed are
free when its lease ends.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterator
from http import HTTPStatus

import httpx
from prefect.client.orchestration import get_client
from prefect.concurrency.asyncio import ConcurrencySlotAcquisitionError, concurrency
from prefect.exceptions import ObjectNotFound

from milepost.engines.gpu_placement import has_spare, slots
from milepost.flows.engine_checks import usable_gpus
from milepost.flows.progress import say
from milepost.flows.view import is_unreported
from milepost.storage.parameters import Parameters

LEASE_SECONDS = 60.0
ASK_SECONDS = 2.0


def machine_slots() -> int:
    """The GPUs of this machine, or its cores where it has none."""
    return usable_gpus() or os.cpu_count() or 1


def wanted_slots(parameters: Parameters, *, gpus: bool) -> int:
    """The GPUs that a run uses at once, or its cores: trainer and engines work in turn, the spare engine all the time.

    Fakes use one core.
    """
    if gpus:
        return slots(parameters).count
    cores, engines = os.cpu_count() or 1, parameters.engines
    ranks = parameters.model.ranks * (parameters.perf.train_threads or cores)
    serving = (engines.rollout_threads or cores) * (engines.rollout == "embedded")
    in_turn = max(1, ranks * (engines.train == "megatron"), serving * engines.rollout_engines)
    return in_turn + serving * has_spare(parameters)


@contextlib.asynccontextmanager
async def engine_slots(
    parameters: Parameters, waiting: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
) -> AsyncIterator[None]:
    """Hold the slots of a run, `waiting` until they are free; it goes on without them when Prefect does not answer."""
    limit = await _limit(parameters.engines.pool)
    occupied = min(limit, wanted_slots(parameters, gpus=usable_gpus() > 0))
    if not occupied:
        yield
        return
    async with contextlib.AsyncExitStack() as held:
        with _unless_unreported():
            say(f"this run takes {occupied} of {limit} slots of {parameters.engines.pool!r}, once they are free")
            with waiting:
                turn = await _free(parameters.engines.pool, occupied)
            held.push_async_callback(_give_back, turn)
        yield


async def _free(name: str, count: int) -> contextlib.AbstractAsyncContextManager[None]:
    """So many slots, entered once they are free.

    The waiting is done here: a thread of Prefect's that waits for slots keeps a process that is told to end.
    """
    while True:
        turn = concurrency(
            name, occupy=count, max_retries=0, lease_duration=LEASE_SECONDS, raise_on_lease_renewal_failure=False
        )
        try:
            await turn.__aenter__()
            return turn
        except ConcurrencySlotAcquisitionError as error:
            if not _is_taken(error):
                raise
        await asyncio.sleep(ASK_SECONDS)


def _is_taken(error: ConcurrencySlotAcquisitionError) -> bool:
    answer = error.__cause__
    return isinstance(answer, httpx.HTTPStatusError) and answer.response.status_code == HTTPStatus.LOCKED


async def _limit(name: str) -> int:
    """Slots of the concurrency limit called `name`; 0 when there is none."""
    if name:
        with contextlib.suppress(ObjectNotFound), _unless_unreported():
            async with get_client() as client:
                found = await client.read_global_concurrency_limit_by_name(name)
                return found.limit if found.active else 0
    return 0


async def _give_back(turn: contextlib.AbstractAsyncContextManager[None]) -> None:
    with _unless_unreported():
        await turn.__aexit__(None, None, None)


@contextlib.contextmanager
def _unless_unreported() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if not is_unreported(error):
            raise
