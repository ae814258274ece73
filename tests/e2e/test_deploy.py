"""Deployments on a real server, run by a real worker elsewhere: to the end, refused, cancelled, killed and paused."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import psutil
import pytest
import yaml
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas import filters
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.states import Cancelling, State

from milepost.storage import manifest, runs
from milepost.storage.runs import RunFolder

pytestmark = pytest.mark.slow

MILEPOST = str(Path(sys.executable).parent / "milepost")
TINY: dict[str, Any] = {
    "steps": 2,
    "model": {"path": "model", "context_length": 32},
    "data": {
        "path": "prompts.jsonl",
        "apply_chat_template": False,
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 2,
    },
    "rollout": {"max_new_tokens": 4, "shards": 1},
    "reward": {"name": "exact"},
    "algorithm": {"num_steps_per_rollout": 1},
    "engines": {"train": "fake", "rollout": "fake"},
    "tracking": {"enabled": False},
}
POOL = "deployed"


class Site:
    """A folder from which `milepost deploy` was called, its worker, and the server that both speak to."""

    def __init__(self, client: SyncPrefectClient, folder: Path, worker: psutil.Process) -> None:
        self.client, self.folder, self.worker = client, folder, worker

    def post(self, name: str, **parameters: Any) -> httpx.Response:
        """What the run form of a deployment sends."""
        found = self.client.read_deployment_by_name(name)
        url = f"{str(self.client.api_url).rstrip('/')}/deployments/{found.id}/create_flow_run"
        while (answer := httpx.post(url, json={"parameters": parameters}, timeout=60)).status_code == 503:
            time.sleep(1)  # its database is busy
        return answer

    def start(self, name: str, **parameters: Any) -> UUID:
        answer = self.post(name, **parameters)
        assert answer.status_code == 201, answer.text
        return UUID(answer.json()["id"])

    def until(self, flow_run: UUID, *names: str, seconds: float = 120) -> FlowRun:
        """The flow run, once it is in a state of one of these names."""
        found = self.client.read_flow_run(flow_run)
        assert within(seconds, lambda: self.state(flow_run) in names), f"{found.name} is {self.state(flow_run)}"
        return self.client.read_flow_run(flow_run)

    def state(self, flow_run: UUID) -> str:
        return str(self.client.read_flow_run(flow_run).state_name)

    def trained(self, flow_run: UUID, steps: int) -> RunFolder:
        """The run that a flow run works on, after so many finished steps."""
        self.until(flow_run, "Running")
        folder = self.run(flow_run)
        assert within(120, lambda: len(manifest.finished_steps(folder)) >= steps)
        return folder

    def run(self, flow_run: UUID) -> RunFolder:
        """A run that nobody named is called by its deployment and its flow run."""
        return runs.run_folder(str(self.folder / "runs"), f"tiny-{str(flow_run)[-8:]}")

    def below(self, flow_run: UUID) -> set[str]:
        """States of the steps that a flow run shows."""
        parent = filters.FlowRunFilterParentFlowRunId(any_=[flow_run])
        found = self.client.read_flow_runs(flow_run_filter=filters.FlowRunFilter(parent_flow_run_id=parent))
        return {str(step.state_name) for step in found}


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.2)
    return condition()


def living(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [found for found in processes if found.is_running() and found.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture(scope="module")
def site(prefect_server: str, model_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    (folder / "model").symlink_to(model_dir)
    rows = "".join(f'{{"prompt": "{number}+1=", "label": "{number + 1}"}}\n' for number in range(16))
    (folder / "prompts.jsonl").write_text(rows)
    (folder / "tiny.yaml").write_text("# Sums on fake engines.\n" + yaml.safe_dump(TINY))
    command = [MILEPOST, "deploy", "--pool", POOL, "--recipe", "tiny.yaml", "--slots", "2"]
    environment = {**os.environ, "PREFECT_API_URL": prefect_server}
    subprocess.run([*command, "--no-worker"], check=True, cwd=folder, env=environment, timeout=120)
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
    assert within(90, lambda: "started!" in (folder / "log").read_text()), (folder / "log").read_text()
    (worker,) = psutil.Process(process.pid).children()
    with get_client(sync_client=True) as client:
        yield Site(client, folder, worker)
    process.terminate()
    assert process.wait(90) == 0 and not living([worker])


def test_a_form_is_filled_in_by_the_recipe_and_relative_paths_start_where_deploy_was_called(site: Site) -> None:
    found = site.client.read_deployment_by_name("train/tiny")
    assert found.parameters["data"]["rollout_batch_size"] == 4 and found.parameters["rollout"]["temperature"] == 1.0
    assert found.parameters["root"] == str(site.folder / "runs")
    assert found.description == "**Train by the recipe `tiny.yaml`.** Sums on fake engines."
    schema = found.parameter_openapi_schema
    assert schema and "run" not in schema.get("required", [])
    fields = schema["definitions"]["OptimizerSection"]["properties"]
    assert fields["lr"]["description"] == "Peak learning rate." and fields["lr"]["exclusiveMinimum"] == 0


def test_deploying_twice_changes_nothing_that_somebody_set_meanwhile(site: Site) -> None:
    before = site.client.read_deployment_by_name("train/tiny")
    pool, limit = site.client.read_work_pool(POOL), "milepost-engines"
    command = [MILEPOST, "deploy", "--pool", POOL, "--recipe", "tiny.yaml", "--no-worker"]
    environment = {**os.environ, "PREFECT_API_URL": str(site.client.api_url).rstrip("/")}
    subprocess.run(command, check=True, cwd=site.folder, env=environment, timeout=120)
    after = site.client.read_deployment_by_name("train/tiny")
    assert after.id == before.id and after.parameter_openapi_schema == before.parameter_openapi_schema
    assert site.client.read_work_pool(POOL).concurrency_limit == pool.concurrency_limit == 8
    assert site.client.read_global_concurrency_limit_by_name(limit).limit == 2


@pytest.mark.parametrize(
    ("name", "parameters", "reason"),
    [
        ("train/train", {"optimizer": {"lrr": 1}}, "'lrr' was unexpected"),
        ("train/train", {"optimizer": {"lr": -1}}, "less than or equal to the minimum"),
        ("train/train", {"optimizer": {"schedule": "cosine"}}, "not one of"),
        ("train/train", {"model": {"path": 3}}, "not of type 'string'"),
        ("train/train", {"stepz": 3}, "'stepz' was unexpected"),
        ("resume/resume", {}, "'run' is a required property"),
    ],
)
def test_a_wrong_value_is_refused_before_anything_starts(
    site: Site, name: str, parameters: dict[str, Any], reason: str
) -> None:
    answer = site.post(name, **parameters)
    assert answer.status_code == 409 and reason in answer.text


def test_a_worker_elsewhere_trains_to_the_end_and_replays_it(site: Site) -> None:
    trained = site.start("train/tiny")
    site.until(trained, "Completed")
    assert manifest.finished_steps(site.run(trained)) == [0, 1]
    replayed = site.start("replay/replay", run=site.run(trained).run_id)
    site.until(replayed, "Completed", "Failed")
    assert site.state(replayed) == "Completed"


def test_a_cancelled_run_ends_within_30_seconds_leaves_nothing_running_and_can_go_on(site: Site) -> None:
    flow_run = site.start("train/tiny", steps=100000)
    folder = site.trained(flow_run, 2)
    started = site.worker.children(recursive=True)
    assert len(started) > 5
    site.client.set_flow_run_state(flow_run, Cancelling())
    site.until(flow_run, "Cancelled", seconds=30)
    assert within(10, lambda: not living(started))
    states = [state.name for state in site.client.read_flow_run_states(flow_run)]
    assert states[-2:] == ["Cancelling", "Cancelled"] and site.below(flow_run) <= {"Completed", "Cancelled"}
    assert site.client.read_global_concurrency_limit_by_name("milepost-engines").active_slots == 0
    done = len(manifest.finished_steps(folder))
    site.until(site.start("resume/resume", run=folder.run_id, steps=done + 1), "Completed")
    assert len(manifest.finished_steps(folder)) == done + 1


def test_a_run_whose_process_is_killed_is_shown_as_crashed_with_its_steps(site: Site) -> None:
    flow_run = site.start("train/tiny", steps=100000)
    site.trained(flow_run, 2)
    (process,) = site.worker.children()
    process.kill()
    site.until(flow_run, "Crashed", seconds=30)
    assert within(30, lambda: site.below(flow_run) <= {"Completed", "Crashed"})


def test_a_paused_run_gives_its_engines_back_and_resumes_where_it_stopped(site: Site) -> None:
    flow_run = site.start("train/tiny", steps=100000)
    folder = site.trained(flow_run, 2)
    started = site.worker.children(recursive=True)
    later = datetime.now(UTC) + timedelta(minutes=5)
    details = {"pause_timeout": later, "pause_reschedule": True}  # as the button on the page sends it
    paused = State(type=StateType.PAUSED, name="Suspended", state_details=details)
    site.client.set_flow_run_state(flow_run, paused, force=True)
    assert within(30, lambda: not living(started)) and site.state(flow_run) == "Suspended"
    done = len(manifest.finished_steps(folder))
    site.client.resume_flow_run(flow_run)
    site.trained(flow_run, done + 2)
    site.client.set_flow_run_state(flow_run, Cancelling())
    site.until(flow_run, "Cancelled", seconds=30)
    assert within(30, lambda: site.below(flow_run) <= {"Completed", "Crashed", "Cancelled"})
