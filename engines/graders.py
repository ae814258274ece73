"""A bounded pool of Ray actors that run named functions, each call in a process with a deadline of its own.

The name of a function travels, never the function. An actor only minds its grader process, so what a call does cannot
hang or kill it; an actor that is lost all the same is started again and its calls are made again.
"""

import asyncio
import itertools
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from milepost.engines import cluster
from milepost.engines.grader_process import MEMORY_BYTES, START_SECONDS, Answer, Call, GraderProcess, lot_size

import ray  # isort: skip  (after cluster, which sets how it authenticates)

__all__ = ["Answer", "Call", "GraderPool"]

ATTEMPTS = 5  # with RESTART_SECONDS between them: a restart takes a second or two
BEAT_TIMEOUT_SECONDS = 10.0
RESTART_SECONDS = 0.5


class _Grader:
    """The actor: a grader process without network and one with it, each started when it is first asked."""

    def __init__(self, path: list[str], memory_bytes: int) -> None:
        sys.path.extend(entry for entry in path if entry not in sys.path)
        self._processes = {
            network: GraderProcess(memory_bytes=memory_bytes, network=network) for network in (False, True)
        }

    def ask(self, calls: list[Call], timeout_seconds: float, warm_up: Call | None, network: bool) -> list[Answer]:
        return self._processes[network].ask_all(calls, timeout_seconds=timeout_seconds, warm_up=warm_up)

    @ray.method(concurrency_group=cluster.CONTROL)  # type: ignore[untyped-decorator]
    def beat(self) -> int:
        """Calls answered so far: one that does not grow while calls wait means a stuck actor."""
        return sum(process.answered for process in self._processes.values())

    @ray.method(concurrency_group=cluster.CONTROL)  # type: ignore[untyped-decorator]
    def close(self) -> None:
        for process in self._processes.values():
            process.close()


@dataclass(frozen=True)
class GraderPool:
    """The graders of a run. Any process of the cluster may connect to them, and several may ask at a time."""

    run: str
    actors: tuple[Any, ...]

    @staticmethod
    def start(run: str, *, workers: int, memory_bytes: int = MEMORY_BYTES) -> "GraderPool":
        """Start the actors; they live until `close`, or until this pool and its process are gone."""
        path = [os.path.abspath(entry) for entry in sys.path]
        # Ray starts a lost actor again under its name: nothing that cannot be had again is in one.
        remote = ray.remote(num_cpus=0, max_restarts=-1, max_concurrency=1, concurrency_groups={cluster.CONTROL: 2})
        named = [remote(_Grader).options(name=_name(run, i), namespace=cluster.NAMESPACE) for i in range(workers)]
        return GraderPool(run, tuple(actor.remote(path, memory_bytes) for actor in named))

    @staticmethod
    def connect(run: str, *, workers: int) -> "GraderPool":
        """The pool that `start` started; LookupError when there is none."""
        return GraderPool(run, tuple(cluster.actor(_name(run, index)) for index in range(workers)))

    async def map(
        self,
        function: str,
        items: Sequence[Sequence[Any]],
        *,
        timeout_seconds: float,
        warm_up: Call | None = None,
        network: bool = False,
    ) -> list[Answer]:
        """`function(*item)` for every item, in order, each within `timeout_seconds`.

        Arguments and values are JSON. `warm_up` runs once in each new process, outside the deadline. A call that hangs,
        crashes its process or raises has a reason in place of a value, and costs no other call anything. The processes
        that make calls with `network` are not those that make the others.
        """
        calls = [Call(function, tuple(item)) for item in items]
        answers: dict[int, Answer] = {}
        position = iter(range(len(calls)))

        async def work(actor: Any) -> None:
            size = 1
            while places := list(itertools.islice(position, size)):
                lot = [calls[place] for place in places]
                found = await _ask(actor, lot, timeout_seconds, warm_up, network)
                answers.update(zip(places, found, strict=True))
                size = lot_size(size, found)

        await asyncio.gather(*(work(actor) for actor in self.actors))
        return [answers[place] for place in range(len(calls))]

    def close(self) -> None:
        """End the actors and their processes, whatever they are doing."""
        closing = [actor.close.remote() for actor in self.actors]
        ray.wait(closing, num_returns=len(closing), timeout=BEAT_TIMEOUT_SECONDS)
        for actor in self.actors:
            cluster.kill(actor)


def _name(run: str, index: int) -> str:
    return f"{run}/grader-{index}"


async def _ask(
    actor: Any, calls: list[Call], timeout_seconds: float, warm_up: Call | None, network: bool
) -> list[Answer]:
    """The answers of one actor. When it is lost with several calls, each is made alone: none costs another."""
    for _ in range(ATTEMPTS):
        try:
            return await _answers(actor, calls, timeout_seconds, warm_up, network)
        except ray.exceptions.RayActorError:
            await asyncio.sleep(RESTART_SECONDS)
    if len(calls) == 1:
        return [Answer(None, "crash", 0.0)]
    return [answer for call in calls for answer in await _ask(actor, [call], timeout_seconds, warm_up, network)]


async def _answers(
    actor: Any, calls: list[Call], timeout_seconds: float, warm_up: Call | None, network: bool
) -> list[Answer]:
    """Wait for an actor as long as it makes progress; one that makes none is killed, which raises RayActorError."""
    pending = asyncio.wrap_future(actor.ask.remote(calls, timeout_seconds, warm_up, network).future())
    seen = -1
    while True:
        # One call may take its deadline twice (a crash is tried again), and start two processes.
        done, _ = await asyncio.wait([pending], timeout=2 * (timeout_seconds + START_SECONDS))
        if done:
            answers: list[Answer] = pending.result()
            return answers
        beat = asyncio.wrap_future(actor.beat.remote().future())
        done, _ = await asyncio.wait([beat], timeout=BEAT_TIMEOUT_SECONDS)
        if not done or beat.result() == seen:
            ray.kill(actor, no_restart=False)
        else:
            seen = beat.result()
