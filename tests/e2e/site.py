"""A folder from which `milepost deploy` was called, with a worker, and the server that both speak to."""

import http.server
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from prefect.states import State

from milepost.flows import services
from milepost.flows.failure import TERMINATED
from milepost.flows.prefect_client import prefect_client
from milepost.storage import manifest, runs
from milepost.storage.runs import RunFolder

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
SLOW = """
import asyncio

from milepost.tasks.rollouts import single_turn


async def turn(generate, prompt, params):
    await asyncio.sleep(12)
    return await single_turn(generate, prompt, params)
"""


class Site:
    """`alerts` is what the webhook was sent."""

    def __init__(self, client: SyncPrefectClient, folder: Path, worker: psutil.Process, alerts: list[bytes]) -> None:
        self.client, self.folder, self.worker, self.alerts = client, folder, worker, alerts

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

    def steps(self, flow_run: UUID) -> dict[str, str]:
        """The steps that a flow run shows, and their states."""
        parent = filters.FlowRunFilterParentFlowRunId(any_=[flow_run])
        found = self.client.read_flow_runs(flow_run_filter=filters.FlowRunFilter(parent_flow_run_id=parent))
        return {step.name: str(step.state_name) for step in found}

    def below(self, flow_run: UUID) -> set[str]:
        """States of the steps that a flow run shows."""
        return set(self.steps(flow_run).values())

    def suspend(self, flow_run: UUID) -> None:
        """What the button on the page sends."""
        later = datetime.now(UTC) + timedelta(minutes=5)
        details = {"pause_timeout": later, "pause_reschedule": True}
        paused = State(type=StateType.PAUSED, name="Suspended", state_details=details)
        self.client.set_flow_run_state(flow_run, paused, force=True)


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.2)
    return condition()


def living(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [found for found in processes if found.is_running() and found.status() != psutil.STATUS_ZOMBIE]


@contextmanager
def webhook() -> Iterator[tuple[str, list[bytes]]]:
    """An address that takes what is posted to it, and what it was sent so far."""
    taken: list[bytes] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            taken.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing."""

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/alerts", taken
        server.shutdown()


@contextmanager
def server(home: Path) -> Iterator[str]:
    """A Prefect server as `milepost up` starts it, with all of its services, which those of single runs have not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MILEPOST_HOME", str(home))
        try:
            url = services.up(str(home), say=lambda text: None, mlflow=False, ray=False).prefect_url
            assert url
            with prefect_client(url, "CRITICAL", drain=False):
                yield url
        finally:
            services.down(say=lambda text: None)


@contextmanager
def opened(model_dir: str, folder: Path) -> Iterator[Site]:
    """One site, with a webhook that alerts are sent to and a schedule for evaluations."""
    (folder / "model").symlink_to(model_dir)
    rows = "".join(f'{{"prompt": "{number}+1=", "label": "{number + 1}"}}\n' for number in range(16))
    (folder / "prompts.jsonl").write_text(rows)
    (folder / "slow.py").write_text(SLOW)
    (folder / "tiny.yaml").write_text("# Sums on fake engines.\n" + yaml.safe_dump(TINY))
    command = [MILEPOST, "deploy", "--pool", POOL, "--recipe", "tiny.yaml", "--slots", "2"]
    with server(folder / "home") as api, webhook() as (url, alerts), get_client(sync_client=True) as client:
        environment = {**os.environ, "PREFECT_API_URL": api, "ALERTS_URL": url}
        wishes = ["--evaluate-every", "0 5 * * *", "--alert-webhook", "env:ALERTS_URL"]
        subprocess.run([*command, *wishes, "--no-worker"], check=True, cwd=folder, env=environment, timeout=120)
        with open(folder / "log", "wb") as log:
            process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
        assert within(90, lambda: "started!" in (folder / "log").read_text()), (folder / "log").read_text()
        (worker,) = psutil.Process(process.pid).children()
        yield Site(client, folder, worker, alerts)
        process.terminate()
        assert process.wait(90) == TERMINATED and not living([worker])
