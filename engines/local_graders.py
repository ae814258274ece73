"""Grader processes of this process's own, for work outside a Ray cluster: the same deadlines, without actors."""

import asyncio
import itertools
import os
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from milepost.engines.grader_process import MEMORY_BYTES, Answer, Call, GraderProcess, lot_size


class LocalGraders:
    """As many processes as there are cores, unless told; they end with the block that this is entered for."""

    def __init__(self, *, workers: int | None = None, memory_bytes: int = MEMORY_BYTES) -> None:
        count = workers or os.cpu_count() or 1
        self._processes = {
            network: [GraderProcess(memory_bytes=memory_bytes, network=network) for _ in range(count)]
            for network in (False, True)
        }

    def __enter__(self) -> "LocalGraders":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for process in (*self._processes[False], *self._processes[True]):
            process.close()

    async def map(
        self,
        function: str,
        items: Sequence[Sequence[Any]],
        *,
        timeout_seconds: float,
        warm_up: Call | None = None,
        network: bool = False,
    ) -> list[Answer]:
        """`function(*item)` for every item, in order, each within `timeout_seconds`; see GraderPool.map."""
        calls = [Call(function, tuple(item)) for item in items]
        position = iter(range(len(calls)))  # shared by all threads: each takes the next lot when it is free
        answers: dict[int, Answer] = {}

        def work(process: GraderProcess) -> None:
            size = 1
            while places := list(itertools.islice(position, size)):
                lot = [calls[place] for place in places]
                found = process.ask_all(lot, timeout_seconds=timeout_seconds, warm_up=warm_up)
                answers.update(zip(places, found, strict=True))
                size = lot_size(size, found)

        await asyncio.gather(*(asyncio.to_thread(work, process) for process in self._processes[network]))
        return [answers[place] for place in range(len(calls))]
