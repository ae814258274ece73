"""Whose turn on shared GPUs it is: rollout engines and trainer give memory up to each other between stages.

Where they share none (`perf.colocate` off) nothing is called. Taking what one has, and giving up what one gave, do
nothing, so every turn may be announced again after a failure.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from milepost.engines.cluster import EngineDied, EngineMissing
from milepost.engines.protocols import RolloutEngine, TrainEngine

WEIGHTS = ("weights",)


@dataclass(frozen=True)
class Turns:
    """The turns of one run. An engine that has died is left to whoever starts it again."""

    colocate: bool
    trainer: TrainEngine | None
    engines: Sequence[RolloutEngine]

    async def training(self) -> None:
        """The trainer works: engines keep nothing, not even weights."""
        if self.colocate and self.trainer:
            await self._engines(lambda engine: engine.release_memory())
            await asyncio.to_thread(self.trainer.resume_memory)

    async def syncing(self) -> None:
        """Weights go over: the trainer has all of its memory, engines that of their weights."""
        if self.colocate:
            await self._engines(lambda engine: engine.resume_memory(WEIGHTS))

    async def generating(self) -> None:
        """Engines work: the trainer's state waits in the host's memory."""
        if self.colocate and self.trainer:
            await asyncio.to_thread(self.trainer.release_memory)
            await self._engines(lambda engine: engine.resume_memory())

    async def _engines(self, do: Callable[[RolloutEngine], None]) -> None:
        asked = (asyncio.to_thread(do, engine) for engine in self.engines)
        for found in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(found, BaseException) and not isinstance(found, EngineDied | EngineMissing):
                raise found
