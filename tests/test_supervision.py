"""A rollout engine that dies is started again alone, and the step that it served goes on."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from milepost.engines.cluster import EngineDied
from milepost.engines.fleet import Fleet, connect_fleet, fleet
from milepost.flows.iteration import iteration
from milepost.flows.loop import recover
from milepost.flows.start import Launched, begin_run
from milepost.flows.step_context import Position
from milepost.flows.supervision import Restarts, supervised
from milepost.router.control import Rotation, rotation
from milepost.storage import manifest, runs
from milepost.storage.parameters import SyncSection
from milepost.tasks.colocate import Turns
from milepost.tasks.sync import push_weights

from .conftest import Prompts
from .test_train_fake import parameters

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect_server", "ray_cluster")]

SLOW = {"delay_seconds": 0.3}

Work = Callable[[Launched, Fleet, int, Position], Awaitable[None]]


def processes(title: str) -> list[psutil.Process]:
    family = psutil.Process().children(recursive=True)
    return [one for one in family if one.is_running() and " ".join(one.cmdline()).startswith(f"ray::{title}")]


async def eventually_serving(router_url: str, count: int) -> Rotation:
    async with asyncio.timeout(30):
        while len((found := await rotation(router_url)).serving) != count:
            await asyncio.sleep(0.1)
    return found


def work_supervised(launched: Launched, work: Work, *, restarts: int = 1) -> None:
    """Recover on slow engines and do `work`, supervised."""

    async def both(engines: Fleet) -> None:
        step, position = await recover(launched, engines)
        await work(launched, engines, step, position)

    async def main(engines: Fleet) -> None:
        await supervised(both(engines), launched, engines, Restarts(restarts))

    model_dir = launched.record.model["folder"]
    with fleet(launched.folder.run_id, launched.parameters, model_dir, engine_options=SLOW) as engines:
        asyncio.run(main(engines))


@pytest.fixture
def launched(request: pytest.FixtureRequest, tmp_path: Path, model_dir: str, prompts: Prompts) -> Launched:
    """A run with as many rollout engines as the test's parameter says, one if it has none."""
    count = getattr(request, "param", 1)
    chosen = parameters(model_dir, prompts(), f"engines.rollout_engines={count}")
    run = f"supervised-{count}-{tmp_path.name[-20:].replace('_', '-')}"
    return begin_run(str(tmp_path), runs.run_folder(str(tmp_path), run), 2, chosen, fence=0)


async def step_with_a_kill(launched: Launched, engines: Fleet, step: int, position: Position) -> None:
    ranks = [one.pid for one in processes("RankActor")]
    running = asyncio.create_task(iteration(launched.root, launched.folder.run_id, step, position))
    await asyncio.sleep(1.2)
    assert not running.done()
    processes("FakeEngine")[0].kill()
    await running
    await eventually_serving(engines.router_url, len(engines.engines))
    assert [one.pid for one in processes("RankActor")] == ranks


def test_the_step_of_the_only_engine_goes_on_when_that_dies_and_nothing_else_is_started_again(
    launched: Launched,
) -> None:
    work_supervised(launched, step_with_a_kill)
    assert manifest.load(launched.folder, 0).accounting["trained"] == 8


async def push_past_a_dead_engine(launched: Launched, engines: Fleet, step: int, position: Position) -> None:
    processes("FakeEngine")[0].kill()
    found = connect_fleet(launched.folder.run_id, launched.parameters)
    pushed = await push_weights(
        7,
        SyncSection(timeout_seconds=60),
        folder=launched.folder,
        trainer=found.trainer,
        engines=list(found.engines),
        router_url=found.router_url,
    )
    assert str((await eventually_serving(found.router_url, 2)).version) == str(pushed.version)
    assert [engine.weight_version() for engine in found.engines] == [pushed.version] * 2


async def kill_in_a_step_and_before_a_push(launched: Launched, engines: Fleet, step: int, position: Position) -> None:
    await step_with_a_kill(launched, engines, step, position)
    await push_past_a_dead_engine(launched, engines, step, position)


@pytest.mark.parametrize("launched", [2], indirect=True)
def test_one_of_two_engines_dies_in_a_step_that_goes_on_and_one_before_a_push_that_it_has_when_it_is_back(
    launched: Launched,
) -> None:
    work_supervised(launched, kill_in_a_step_and_before_a_push, restarts=2)
    assert manifest.load(launched.folder, 0).accounting["trained"] == 8


def colocated(launched: Launched) -> Launched:
    parameters = launched.record.parameters
    perf = parameters.perf.model_copy(update={"colocate": True})
    record = replace(launched.record, parameters=parameters.model_copy(update={"perf": perf}))
    return replace(launched, record=record)


async def kill_in_the_trainers_turn(launched: Launched, engines: Fleet, step: int, position: Position) -> None:
    turns = Turns(True, engines.trainer, engines.engines)
    await turns.training()
    processes("FakeEngine")[0].kill()
    await asyncio.sleep(4)  # a watch looks every second
    assert not processes("FakeEngine")
    await turns.generating()
    await eventually_serving(engines.router_url, 1)


def test_an_engine_that_dies_while_the_trainer_has_the_gpu_waits_for_its_turn(launched: Launched) -> None:
    work_supervised(colocated(launched), kill_in_the_trainers_turn)


def test_the_work_ends_with_the_engine_when_it_may_not_be_started_again(launched: Launched) -> None:
    with pytest.raises(EngineDied, match="a sign of life of .*/rollout-0 ended"):
        work_supervised(launched, step_with_a_kill, restarts=0)
    assert manifest.finished_steps(launched.folder) == []
