"""Runs that want the same engines take turns where there is a limit, and nobody waits where there is none."""

import asyncio
import os
import uuid

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate

from milepost.flows.engine_slots import engine_slots, wanted_slots
from milepost.flows.trainer_alone import without_rollout
from milepost.storage.parameters import EnginesSection, ModelSection, Parameters
from milepost.storage.training import PerfSection

CORES = os.cpu_count() or 1


def parameters(*, pool: str = "", train: str = "fake", rollout: str = "fake", threads: int = 0) -> Parameters:
    engines = EnginesSection.model_validate(
        {"pool": pool, "train": train, "rollout": rollout, "rollout_threads": threads, "rollout_engines": 3}
    )
    return Parameters(engines=engines, perf=PerfSection(train_threads=threads), model=ModelSection(tensor_parallel=2))


def test_a_run_wants_the_cores_of_trainer_or_engines_whichever_are_more_because_they_work_in_turn() -> None:
    assert wanted_slots(parameters(train="megatron", rollout="embedded", threads=1), gpus=False) == 3
    assert wanted_slots(parameters(train="megatron", threads=2), gpus=False) == 4
    assert wanted_slots(parameters(train="megatron"), gpus=False) == 2 * CORES
    assert wanted_slots(parameters(), gpus=False) == 1


def test_on_gpus_a_run_wants_those_that_it_reserves() -> None:
    assert wanted_slots(parameters(train="megatron"), gpus=True) == 2
    assert wanted_slots(parameters(train="megatron", rollout="sglang"), gpus=True) == 5
    assert wanted_slots(parameters(), gpus=True) == 0


def test_a_trainer_alone_wants_its_own_cores_only() -> None:
    assert wanted_slots(without_rollout(parameters(train="megatron", rollout="embedded", threads=1)), gpus=False) == 2
    assert wanted_slots(without_rollout(parameters(train="megatron", rollout="sglang")), gpus=True) == 2


@pytest.mark.slow
def test_two_runs_that_want_one_slot_take_turns(prefect_server: str) -> None:
    name, seen = f"engines-{uuid.uuid4().hex[:8]}", []
    with get_client(sync_client=True) as client:
        client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=name, limit=1))

    async def run(run: str) -> None:
        async with engine_slots(parameters(pool=name, train="megatron")):  # wants more than there are, and gets all
            seen.append(run)
            await asyncio.sleep(1)
            seen.append(run)

    async def both() -> None:
        await asyncio.wait_for(asyncio.gather(run("a"), run("b")), 90)

    asyncio.run(both())
    assert seen in (["a", "a", "b", "b"], ["b", "b", "a", "a"])
    with get_client(sync_client=True) as client:
        assert client.read_global_concurrency_limit_by_name(name).active_slots == 0


@pytest.mark.slow
def test_nobody_waits_for_a_limit_that_is_not_there(prefect_server: str) -> None:
    async def run() -> None:
        async with engine_slots(parameters(pool="nothing-of-this-name")):
            pass

    asyncio.run(asyncio.wait_for(run(), 30))
