"""On shared GPUs memory changes hands between the stages, and never belongs to two that need all of it."""

import asyncio
from typing import Any

import pytest

from milepost.engines.cluster import EngineDied
from milepost.tasks.colocate import Turns


class Recorded:
    """Stands in for an engine or a trainer and writes down what it was told."""

    def __init__(self, name: str, told: list[str], *, failure: Exception | None = None) -> None:
        self._name, self._told, self._failure = name, told, failure

    def release_memory(self) -> None:
        self._tell("gives")

    def resume_memory(self, tags: Any = None) -> None:
        self._tell(f"takes {'all' if tags is None else ','.join(tags)}")

    def _tell(self, what: str) -> None:
        if self._failure:
            raise self._failure
        self._told.append(f"{self._name} {what}")


async def a_step(turns: Turns) -> None:
    await turns.training()
    await turns.syncing()
    await turns.generating()


def turns(colocate: bool, told: list[str], *, failure: Exception | None = None) -> Turns:
    engines: list[Any] = [Recorded("engine", told), Recorded("other", told, failure=failure)][: 2 if failure else 1]
    trainer: Any = Recorded("trainer", told)
    return Turns(colocate, trainer, engines)


def test_each_gives_before_the_other_takes() -> None:
    told: list[str] = []
    asyncio.run(a_step(turns(True, told)))
    assert told == [
        "engine gives", "trainer takes all",
        "engine takes weights",
        "trainer gives", "engine takes all",
    ]  # fmt: skip


def test_nothing_is_called_where_no_gpu_is_shared() -> None:
    told: list[str] = []
    asyncio.run(a_step(turns(False, told)))
    assert told == []


def test_a_dead_engine_is_left_to_whoever_starts_it_again() -> None:
    told: list[str] = []
    asyncio.run(a_step(turns(True, told, failure=EngineDied("it died"))))
    assert len(told) == 5
    with pytest.raises(RuntimeError, match="out of memory"):
        asyncio.run(a_step(turns(True, told, failure=RuntimeError("out of memory"))))
