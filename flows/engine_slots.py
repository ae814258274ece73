"""Runs take turns: a concurrency limit of the Prefect server has a slot for each GPU, or core, of the engines.

`milepost deploy` creates the limit; where there is none, nobody waits. The slots of a run whose process is killed are
free when its lease ends.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Literal, TypeVar
from uuid import UUID

import httpx
from prefect.client.orchestration import PrefectClient, get_client
from prefect.exceptions import ObjectNotFound

from milepost.engines.gpu_placement import has_spare, slots
from milepost.flows.engine_checks import usable_gpus
from milepost.flows.polling import polled
from milepost.flows.prefect_client import brief_client
from milepost.flows.progress import say
from milepost.flows.view import is_unreported
from milepost.storage.parameters import Parameters

LEASE_SECONDS = 60.0
RENEW_SECONDS = 15.0
ASK_SECONDS = 2.0
PATIENCE_SECONDS = 600.0

R = TypeVar("R")


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
    """Hold the slots of a run, `waiting` until they are free; it goes on without them when Prefect is gone for long."""
    name = parameters.engines.pool
    limit = await _answered(partial(_limit, name=name)) if name else 0
    count = min(limit or 0, wanted_slots(parameters, gpus=usable_gpus() > 0))
    if not count:
        yield
        return
    say(f"this run takes {count} of {limit} slots of {name!r}, once they are free")
    with waiting:
        held = await _free(name, count)
    if held is None:
        yield
        return
    try:
        with polled(held.renew, RENEW_SECONDS):
            yield
    finally:
        held.give_back()  # and nothing is awaited: the task may be cancelled for good


@dataclass
class _Held:
    """Slots under a lease, which a server that was away for longer has let expire."""

    name: str
    count: int
    lease: UUID

    def renew(self) -> None:
        with brief_client() as client:
            try:
                client.renew_concurrency_lease(self.lease, LEASE_SECONDS)
            except httpx.HTTPStatusError as error:
                if error.response.status_code != HTTPStatus.GONE:
                    raise
                # To be had again unless somebody has taken them since: the next round asks once more.
                self.lease = _lease(
                    client.increment_concurrency_slots_with_lease(
                        names=[self.name], slots=self.count, mode="concurrency", lease_duration=LEASE_SECONDS
                    )
                )

    def give_back(self) -> None:
        try:
            with brief_client() as client:
                client.release_concurrency_slots_with_lease(self.lease)
        except Exception as error:
            if not is_unreported(error):
                raise


async def _free(name: str, count: int) -> _Held | None:
    """So many slots, once they are free; None when Prefect is gone for long.

    The waiting is done here: a thread of Prefect's that waits for slots keeps a process that is told to end.
    """

    async def ask(client: PrefectClient) -> _Held | Literal["taken"]:
        try:
            answer = await client.increment_concurrency_slots_with_lease(
                names=[name], slots=count, mode="concurrency", lease_duration=LEASE_SECONDS
            )
        except httpx.HTTPStatusError as error:
            if error.response.status_code == HTTPStatus.LOCKED:
                return "taken"
            raise
        return _Held(name, count, _lease(answer))

    while (held := await _answered(ask)) == "taken":
        await asyncio.sleep(ASK_SECONDS)
    return held


def _lease(answer: httpx.Response) -> UUID:
    return UUID(answer.json()["lease_id"])


async def _limit(client: PrefectClient, name: str) -> int:
    """Slots of the concurrency limit called `name`; 0 when there is none."""
    try:
        found = await client.read_global_concurrency_limit_by_name(name)
    except ObjectNotFound:
        return 0
    return found.limit if found.active else 0


async def _answered(ask: Callable[[PrefectClient], Awaitable[R]]) -> R | None:
    """What Prefect says to that; None, and said so, when it does not answer for long.

    A server that is busy, or started anew, is no reason to take engines that another run has.
    """
    begun, is_silent = time.monotonic(), False
    while True:
        try:
            async with get_client() as client:
                return await ask(client)
        except Exception as error:
            if not is_unreported(error):
                raise
        if time.monotonic() - begun > PATIENCE_SECONDS:
            say("Prefect does not answer: this run goes on and takes no slots, other runs may use the same engines")
            return None
        if not is_silent:
            say("Prefect does not answer: this run waits until it says whose turn it is")
        is_silent = True
        await asyncio.sleep(ASK_SECONDS)
