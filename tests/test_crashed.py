"""Flow runs of killed processes are shown as crashed, with all below them; those of living processes never are."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import UUID

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas import filters
from prefect.client.schemas.objects import FlowRun
from prefect.states import Completed

from milepost.flows import crashed, prefect_client, services
from milepost.storage import files, runs
from milepost.storage.lease import hold

from .bench.made_run import make_run

pytestmark = pytest.mark.slow

WORKER = """
import asyncio, sys, time
from prefect import flow, task
from prefect.runtime import flow_run
from milepost.flows.crashed import record_owner

@task
def work(parent: str) -> None:
    print(parent, flush=True)
    time.sleep(600)

@flow(name="step", flow_run_name="step-0")
async def step(parent: str) -> None:
    work(parent)

@flow(name="train")
async def train() -> None:
    record_owner(sys.argv[1], int(sys.argv[2]), "milepost resume lost")
    await step(str(flow_run.id))

asyncio.run(train())
"""


class Worker:
    """A process of its own inside a task inside a subflow inside a flow run, which says that it is its owner."""

    def __init__(self, client: SyncPrefectClient, run_uri: str, fence: int) -> None:
        command = [sys.executable, "-c", WORKER, run_uri, str(fence)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.id = UUID(self.process.stdout.readline().strip())
        self.client = client

    def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
            self.process.communicate()

    def run(self) -> FlowRun:
        return self.client.read_flow_run(self.id)

    def states(self) -> list[str]:
        """Of the flow run, of its subflow, and of every task run of both."""
        below = filters.FlowRunFilterParentFlowRunId(any_=[self.id])
        flow_runs = [
            self.run(),
            *self.client.read_flow_runs(flow_run_filter=filters.FlowRunFilter(parent_flow_run_id=below)),
        ]
        inside = filters.TaskRunFilterFlowRunId(any_=[run.id for run in flow_runs])
        tasks = self.client.read_task_runs(task_run_filter=filters.TaskRunFilter(flow_run_id=inside))
        return [str(run.state_name) for run in [*flow_runs, *tasks]]


@pytest.fixture
def client(prefect_server: str) -> Iterator[SyncPrefectClient]:
    with get_client(sync_client=True) as found:
        yield found


Start = Callable[..., Worker]


@pytest.fixture
def start(client: SyncPrefectClient, tmp_path: Path) -> Iterator[Start]:
    started: list[Worker] = []

    def begin(run_uri: str = str(tmp_path), fence: int = 1) -> Worker:
        started.append(Worker(client, run_uri, fence))
        return started[-1]

    yield begin
    for worker in started:
        worker.kill()
    crashed.mark_gone(str(client.api_url).rstrip("/"))


@contextmanager
def anything_of_ours() -> Iterator[None]:
    with services.prefect_api(say=lambda text: None, console_level="CRITICAL"):
        yield


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)
    return condition()


def test_a_killed_flow_is_shown_as_crashed_with_all_below_it_at_the_next_start(start: Start) -> None:
    worker = start()
    assert eventually(lambda: worker.states() == ["Running"] * 4)
    worker.kill()
    assert worker.states() == ["Running"] * 4
    with anything_of_ours():
        assert worker.states() == ["Crashed"] * 4
    state = worker.run().state
    assert state and state.message == (
        f"process {worker.process.pid} on {socket.gethostname()} was killed or lost this run; "
        "go on with: milepost resume lost"
    )


def test_a_flow_whose_process_lives_is_left_alone_even_when_it_is_stopped(start: Start) -> None:
    worker = start()
    os.kill(worker.process.pid, signal.SIGSTOP)
    with anything_of_ours():
        assert worker.run().state_name == "Running"


def test_a_flow_that_ends_in_order_while_it_is_looked_at_stays_completed(
    start: Start, client: SyncPrefectClient
) -> None:
    worker = start()

    def ends(run: FlowRun) -> bool:
        client.set_flow_run_state(run.id, Completed(), force=True)
        return True

    crashed._mark(client, ends)
    assert worker.run().state_name == "Completed"


def test_a_retried_flow_is_not_judged_by_the_process_before(start: Start, client: SyncPrefectClient) -> None:
    worker = start()
    client.update_flow_run_labels(worker.id, {"milepost.attempt": 0})
    worker.kill()
    with anything_of_ours():
        assert worker.run().state_name == "Running"
    client.update_flow_run_labels(worker.id, {"milepost.attempt": 1})


def test_odd_labels_prove_nothing_and_hide_no_other_run(start: Start, client: SyncPrefectClient) -> None:
    odd, plain = start(), start()
    client.update_flow_run_labels(odd.id, {"milepost.pid": "many"})
    for worker in (odd, plain):
        worker.kill()
    with anything_of_ours():
        assert (odd.run().state_name, plain.run().state_name) == ("Running", "Crashed")
    client.update_flow_run_labels(odd.id, {"milepost.pid": odd.process.pid})


@pytest.mark.parametrize(("released", "state"), [(False, "Crashed"), (True, "Running")])
def test_a_run_that_was_taken_over_from_another_host_has_crashed_there(
    start: Start, client: SyncPrefectClient, tmp_path: Path, released: bool, state: str
) -> None:
    folder = runs.run_folder(str(tmp_path), "taken")
    with hold(folder) as lease:
        worker, other = start(folder.uri, lease.fence), start(f"{folder.uri}-2", lease.fence)
        if not released:
            crashed.mark_superseded(folder.uri, lease.fence)  # its own claim says nothing against it
    for found in (worker, other):
        client.update_flow_run_labels(found.id, {"milepost.host": "elsewhere"})
    if not released:
        (Path(folder.uri) / "lease" / f"{lease.fence:06d}.released").unlink()
    with anything_of_ours():
        assert worker.run().state_name == "Running"
    crashed.mark_superseded(folder.uri, lease.fence + 1)
    assert (worker.run().state_name, other.run().state_name) == (state, "Running")
    for found in (worker, other):
        client.update_flow_run_labels(found.id, {"milepost.host": socket.gethostname()})


@pytest.mark.parametrize(("steps", "state"), [(2, "Completed"), (3, "Crashed")])
def test_a_run_that_came_to_its_end_while_prefect_was_away_has_not_crashed(
    start: Start, tmp_path: Path, steps: int, state: str
) -> None:
    folder = make_run(str(tmp_path), 2).folder
    record = json.loads(Path(folder.record).read_text())
    files.publish_json(folder.record, record | {"steps": steps}, overwrite=True)
    with hold(folder) as lease:
        worker = start(folder.uri, lease.fence)
    worker.kill()
    with anything_of_ours():
        assert worker.run().state_name == state


def test_a_server_that_does_not_answer_stops_no_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(prefect_client, "BRIEF_SECONDS", 0.2)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        crashed.mark_gone(f"http://127.0.0.1:{silent.getsockname()[1]}/api")
    assert [record.message.partition(":")[0] for record in caplog.records if record.name == crashed.__name__] == [
        "Prefect may show killed runs as running"
    ]


def test_a_step_whose_end_prefect_was_not_told_of_is_ended_before_the_next_one(start: Start) -> None:
    worker = start()
    crashed.complete_unseen(worker.id)
    assert worker.states()[:2] == ["Running", "Completed"]
