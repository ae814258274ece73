"""Rollout engines that die are started again one by one, while the step they served goes on.

The router sends a dead engine's requests to the others, or says that nobody can serve now and is asked again; a new
engine is admitted with the current weights only.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from milepost.engines.cluster import EngineDied, EngineMissing, EngineTimeout
from milepost.engines.fleet import Fleet, is_engine_failure
from milepost.engines.gpu_placement import shares_gpus
from milepost.engines.protocols import WeightHolder, WeightSource
from milepost.engines.rollout_actor import RolloutActor
from milepost.engines.rollout_start import start_rollout
from milepost.flows.failure import first_cause, sentence
from milepost.flows.progress import say
from milepost.flows.start import Launched
from milepost.router.control import add_worker, remove_worker, rotation
from milepost.storage.runs import RunFolder
from milepost.tasks.sync import current_weights, exported, load_into

WATCH_SECONDS = 1.0
STALE_SECONDS = 0.5


@dataclass
class Restarts:
    """How often engines may still be started again before a step is finished."""

    limit: int
    used: int = 0

    def take(self, cause: Exception) -> None:
        """Raise `cause` when there is none left."""
        if self.used >= self.limit:
            raise cause
        self.used += 1

    def refill(self) -> None:
        self.used = 0


async def on_new_engines(attempt: Callable[[], Awaitable[None]], restarts: Restarts) -> None:
    """Make an attempt, which starts engines, and another each time that one of them dies or hangs and ends it."""
    while True:
        try:
            await attempt()
            return
        except Exception as error:  # an engine may fail inside any group of shards; everything else is raised on
            cause = first_cause(error)
            if not is_engine_failure(cause):
                raise
            restarts.take(error)
            say(f"{sentence(cause)}; the engines start again")


async def supervised(work: Coroutine[Any, Any, None], launched: Launched, fleet: Fleet, restarts: Restarts) -> None:
    """Do `work`; a rollout engine that dies meanwhile is started again, and when that fails the work is cancelled."""
    try:
        async with asyncio.TaskGroup() as group:
            engines = range(len(fleet.engines))
            watching = [group.create_task(_keep(index, launched, fleet, restarts)) for index in engines]
            await work
            for watch in watching:
                watch.cancel()
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None  # what failed first; the others were cancelled for it


async def _keep(index: int, launched: Launched, fleet: Fleet, restarts: Restarts) -> None:
    """Watch an engine of the fleet for ever."""
    url, number = "", fleet.first + index
    while True:
        await asyncio.sleep(WATCH_SECONDS)
        engine = fleet.engines[index]
        try:
            url = await engine.require_alive()
        except EngineTimeout:
            continue  # it lives and is slow: the deadline of the stage decides
        except (EngineDied, EngineMissing) as error:
            restarts.take(error)
            attached = launched.parameters.engines.sglang_urls
            say(f"rollout engine {number}: {error}" if attached else f"rollout engine {number} died and starts again")
            await _dismiss(url, fleet.router_url)
            await asyncio.to_thread(engine.close)  # Ray keeps a dead actor's name until it is told to
            await _room(launched, fleet)
            # Where the fleet holds it: an actor ends when whoever started it lets go of its handle.
            fleet.engines[index] = await _started(number, launched)
            url = await admit(fleet.engines[index], launched.folder, fleet)


async def _room(launched: Launched, fleet: Fleet) -> None:
    """Wait for the turn of the engines where they share GPUs with the trainer, or a new one would find no memory."""
    while shares_gpus(launched.parameters) and fleet.trainer and not await fleet.trainer.is_resting():
        await asyncio.sleep(WATCH_SECONDS)


async def _started(number: int, launched: Launched) -> RolloutActor:
    """A new engine. One for a server that was started elsewhere waits for whoever starts that again."""
    engines = launched.parameters.engines
    give_up = time.monotonic() + engines.start_timeout_seconds
    while True:
        try:
            return await asyncio.to_thread(_start, number, launched)
        except ConnectionError:
            if not engines.sglang_urls or time.monotonic() > give_up:
                raise
        await asyncio.sleep(WATCH_SECONDS)


def _start(index: int, launched: Launched) -> RolloutActor:
    return start_rollout(launched.folder.run_id, index, launched.parameters, launched.record.model["folder"])


async def _dismiss(url: str, router_url: str) -> None:
    for worker in (await rotation(router_url)).workers:
        if worker.url == url:
            await remove_worker(router_url, worker)


async def admit(engine: RolloutActor, folder: RunFolder, fleet: Fleet) -> str:
    """Load the current weights into a new engine and let the router use it; again while they change. Its URL.

    A push that found the engine still starting has named its weights before, so it is seen here.
    """
    url = await asyncio.to_thread(engine.url)
    while True:
        source = current_weights(folder)
        if source is not None:
            await asyncio.to_thread(_bring, source, engine, fleet.weights)
        worker = await add_worker(fleet.router_url, url)
        if worker.state != "stale" and current_weights(folder) == source:
            return url
        await asyncio.sleep(STALE_SECONDS)


def _bring(source: WeightSource, engine: RolloutActor, trainer: WeightHolder) -> None:
    """Load `source` unless the engine holds it already: weights sent without a folder it names by a shorter digest."""
    if str(engine.weight_version()) != str(source.version) and exported(source, trainer):
        load_into(engine, source, mode="abort")
