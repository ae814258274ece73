"""What is left to Prefect and Ray, and what is not: neither decides what is done or does it twice."""

import asyncio
import importlib
import os
import pkgutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from prefect import Flow, Task
from prefect.cache_policies import NO_CACHE

from milepost import flows, tasks
from milepost.engines import cluster
from milepost.engines.cluster import EngineDied
from milepost.engines.fleet import fleet
from milepost.engines.protocols import WeightSource, WeightVersion
from milepost.flows.plan import check_size
from milepost.storage import manifest
from milepost.storage.journal import JournalConflict, StepStore
from milepost.storage.parameters import Parameters, RewardSection, RolloutSection
from milepost.storage.schema import PROMPTS
from milepost.storage.tables import TableRef
from milepost.tasks.generate import Shard, generate_rollouts
from milepost.tasks.sampling import Sampling
from milepost.tasks.sync import SyncMismatch, load_into

from .conftest import Prompts
from .test_train_fake import parameters, trained


def decorated(package: Any, kind: type) -> Iterator[Any]:
    """The tasks or flows that the modules of a package define."""
    for found in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{found.name}")
        yield from (item for item in vars(module).values() if isinstance(item, kind))


def test_no_task_is_answered_repeated_or_stored_by_prefect() -> None:
    found = list(decorated(tasks, Task))
    assert len(found) >= 6
    for task in found:
        assert task.cache_policy is NO_CACHE and task.retries == 0 and not task.persist_result, task.name


def test_no_flow_is_repeated_by_prefect() -> None:
    assert {flow.name: flow.retries for flow in decorated(flows, Flow)}.keys() >= {"train", "resume", "iteration"}
    assert all(flow.retries == 0 for flow in decorated(flows, Flow))


def test_parameters_that_no_prefect_server_takes_are_refused_with_the_limit() -> None:
    check_size(Parameters())
    with pytest.raises(ValueError, match=r"the parameters take 6\d+ bytes and may take 500000: put long values into"):
        check_size(Parameters(reward=RewardSection(options={"text": "x" * 600_000})))


def test_rollouts_of_other_weights_or_another_seed_are_never_reused(tmp_path: Path) -> None:
    store = StepStore(str(tmp_path), "run", 0)
    prompts = store.write("prompts", PROMPTS.empty_table(), PROMPTS)

    def generated(version: str, seed: int) -> TableRef:
        sampling = Sampling("single_turn", {}, 1, 32, seed)
        asked = generate_rollouts.fn(
            prompts, Shard(0, 1, 0), sampling, RolloutSection(), weight_version=version, router_url="", store=store
        )
        return asyncio.run(asked)

    assert generated("0-a", 0) == generated("0-a", 0)
    for version, seed in (("1-b", 0), ("0-a", 1)):
        with pytest.raises(JournalConflict, match="generate-r0-s000 of step 0 in run 'run' was committed under key"):
            generated(version, seed)


class StaleEngine:
    """An engine whose transfer is lost: it says so by the weights it holds."""

    resumed = False

    def url(self) -> str:
        return "http://engine"

    def pause(self, mode: str) -> None: ...

    def resume(self) -> None:
        self.resumed = True

    def load_weights(self, source: WeightSource) -> WeightVersion:
        return WeightVersion(0, "a")


def test_a_transfer_that_was_lost_fails_the_sync_and_names_the_engine() -> None:
    engine = StaleEngine()
    with pytest.raises(SyncMismatch, match=r"http://engine holds weights 0.*after loading 1"):
        load_into(engine, WeightSource("here", WeightVersion(1, "b")), mode="retract")
    assert engine.resumed


class Dies:
    """An actor whose work is seen outside before its process ends."""

    def work(self, path: str) -> None:
        with open(path, "a") as file:
            file.write("once\n")
        os._exit(1)


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_what_an_engine_did_before_it_died_is_not_done_again(tmp_path: Path) -> None:
    actor = cluster.start_actor(Dies, "dies/once")
    with pytest.raises(EngineDied, match="asked for work"):
        cluster.wait(actor.work.remote(str(tmp_path / "log")), 60, what="work")
    assert (tmp_path / "log").read_text() == "once\n"


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_two_runs_on_one_machine_share_no_name_and_no_port(model_dir: str, prompts: Prompts) -> None:
    chosen = parameters(model_dir, prompts())
    with ExitStack() as stack:
        pair = [stack.enter_context(fleet(run, chosen, model_dir)) for run in ("left", "right")]
        urls = [url for found in pair for url in (found.router_url, *(engine.url() for engine in found.engines))]
        assert len(set(urls)) == len(urls) and all(url.startswith("http://127.0.0.1:") for url in urls)


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_server", "ray_cluster")
def test_a_hundred_tasks_in_a_step_all_finish(tmp_path: Path, model_dir: str, prompts: Prompts) -> None:
    many = ["data.rollout_batch_size=32", "rollout.shards=32"]
    folder = trained("many", tmp_path, parameters(model_dir, prompts(32), *many), steps=1)
    assert len(manifest.load(folder, 0).commits) == 3 * 32 + 2
