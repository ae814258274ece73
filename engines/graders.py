"""A bounded pool of Ray actors that run named functions, each call in a process with a deadline of its own.

The name of a function travels, never the function. An actor only minds its grader process, so what a call does cannot
hang or kill it; an actor that is lost all the same is replaced and its calls are made again.
"""

import asyncio
import itertools
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray

from milepost.engines import cluster
from milepost.engines.grader_process import MEMORY_BYTES, START_SECONDS, Answer, Call, GraderProcess

__all__ = ["Answer", "Call", "GraderPool"]

CHUNK_SECONDS = 0.2  # calls are sent in lots that take about this long, so that slow ones still spread over the workers
MAX_CHUNK = 64
ATTEMPTS = 3
BEAT_TIMEOUT_SECONDS = 10.0


class _Grader:
    """The actor: one grader process and a count of its answers."""

    def __init__(self, path: list[str], memory_bytes: int) -> None:
        sys.path.extend(entry for entry in path if entry not in sys.path)
        self._process = GraderProcess(memory_bytes=memory_bytes)
        self._answered = 0

    def ask(self, calls: list[Call], timeout_seconds: float, warm_up: Call | None) -> list[Answer]:
        answers = []
        for call in calls:
            answers.append(self._process.ask(call, timeout_seconds=timeout_seconds, warm_up=warm_up))
            self._answered += 1
        return answers

    @ray.method(concurrency_group=cluster.CONTROL)
    def beat(self) -> int:
        """Calls answered so far: one that does not grow while calls wait means a stuck actor."""
        return self._answered

    @ray.method(concurrency_group=cluster.CONTROL)
    def close(self) -> None:
        self._process.close()


@dataclass(frozen=True)
class GraderPool:
    """The graders of a run, by name: any process of the cluster may ask them, several at a time."""

    run: str
    workers: int
    memory_bytes: int = MEMORY_BYTES

    @staticmethod
    def start(run: str, *, workers: int, memory_bytes: int = MEMORY_BYTES) -> "GraderPool":
        """Start the actors, owned by this process; whoever starts a pool closes it."""
        pool = GraderPool(run, workers, memory_bytes)
        for index in range(workers):
            pool._start_actor(index)
        return pool

    @staticmethod
    def connect(run: str, *, workers: int) -> "GraderPool":
        """The pool that another part of the run started."""
        return GraderPool(run, workers)

    async def map(
        self, function: str, items: Sequence[Sequence[Any]], *, timeout_seconds: float, warm_up: Call | None = None
    ) -> list[Answer]:
        """`function(*item)` for every item, in order, each within `timeout_seconds`.

        Arguments and values are JSON. `warm_up` runs once in each new process, outside the deadline. A call that hangs,
        crashes its process or raises has a reason in place of a value, and costs no other call anything.
        """
        calls = [Call(function, tuple(item)) for item in items]
        answers: dict[int, Answer] = {}
        position = iter(range(len(calls)))

        async def work(index: int) -> None:
            size = 1
            while places := list(itertools.islice(position, size)):
                chunk = [calls[place] for place in places]
                found = await self._ask(index, chunk, timeout_seconds, warm_up)
                answers.update(zip(places, found, strict=True))
                slowest = max(answer.seconds for answer in found)
                size = max(1, min(2 * size, MAX_CHUNK, int(CHUNK_SECONDS / max(slowest, 1e-6))))

        await asyncio.gather(*(work(index) for index in range(min(self.workers, max(1, len(calls))))))
        return [answers[place] for place in range(len(calls))]

    def close(self) -> None:
        """End the actors and their processes, whatever they are doing."""
        for index in range(self.workers):
            try:
                handle = cluster.actor(self._name(index))
            except LookupError:
                continue
            try:
                cluster.wait(handle.close.remote(), BEAT_TIMEOUT_SECONDS, what=self._name(index))
            except (cluster.EngineTimeout, ray.exceptions.RayError):
                pass  # it is ended below, and its process ends with it
            cluster.kill(handle)

    def _name(self, index: int) -> str:
        return f"{self.run}/grader-{index}"

    def _start_actor(self, index: int) -> Any:
        path = [os.path.abspath(entry) for entry in sys.path]
        return cluster.start_actor(_Grader, self._name(index), path, self.memory_bytes)

    def _actor(self, index: int) -> Any:
        """The running actor, or a new one in its place."""
        try:
            return cluster.actor(self._name(index))
        except LookupError:
            try:
                return self._start_actor(index)
            except ValueError:  # somebody else was faster
                return cluster.actor(self._name(index))

    async def _ask(self, index: int, calls: list[Call], timeout_seconds: float, warm_up: Call | None) -> list[Answer]:
        """The answers of one actor. When it is lost with several calls, each is made alone: none costs another."""
        for attempt in range(ATTEMPTS):
            await asyncio.sleep(0.2 * attempt)  # the name of a dead actor is free again after a moment
            handle = await asyncio.to_thread(self._actor, index)
            try:
                return await self._answers(handle, calls, timeout_seconds, warm_up)
            except ray.exceptions.RayActorError:
                continue
        if len(calls) == 1:
            return [Answer(None, "crash", 0.0)]
        return [answer for call in calls for answer in await self._ask(index, [call], timeout_seconds, warm_up)]

    async def _answers(
        self, handle: Any, calls: list[Call], timeout_seconds: float, warm_up: Call | None
    ) -> list[Answer]:
        """Wait for an actor as long as it makes progress; one that makes none is killed, which raises RayActorError."""
        pending = asyncio.wrap_future(handle.ask.remote(calls, timeout_seconds, warm_up).future())
        seen = -1
        while True:
            # One call may take its deadline twice (a crash is tried again), and start two processes.
            done, _ = await asyncio.wait([pending], timeout=2 * (timeout_seconds + START_SECONDS))
            if done:
                return pending.result()
            beat = asyncio.wrap_future(handle.beat.remote().future())
            done, _ = await asyncio.wait([beat], timeout=BEAT_TIMEOUT_SECONDS)
            if not done or beat.result() == seen:
                cluster.kill(handle)
            else:
                seen = beat.result()
