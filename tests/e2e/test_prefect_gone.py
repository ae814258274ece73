"""The Prefect server is killed under a run: the run goes on to its end, says so in a sentence, and is shown again."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from milepost.flows import service_state
from milepost.storage import manifest, runs
from milepost.tasks.filters import Keep

pytestmark = pytest.mark.slow

MILEPOST = str(Path(sys.executable).parent / "milepost")
PREFECT_PID = "TEST_PREFECT_PID"
DEADLINE_SECONDS = 240.0
SETTINGS = [
    "engines.train=fake",
    "engines.rollout=fake",
    "data.apply_chat_template=false",
    "data.rollout_batch_size=4",
    "data.n_samples_per_prompt=2",
    "algorithm.num_steps_per_rollout=1",
    "model.context_length=32",
    "rollout.max_new_tokens=4",
    "rollout.shards=1",
    "reward.name=exact",
    "tracking.enabled=false",
]


def kill_prefect_and_drop(group: list[Any]) -> Keep:
    """A group filter."""
    os.kill(int(os.environ[PREFECT_PID]), signal.SIGKILL)
    return Keep(False, "dropped")


class Server:
    """A Prefect server that can be killed, and started again where it was."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.port = service_state.free_ports(1)[0]
        self.url = f"http://127.0.0.1:{self.port}/api"
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "prefect", "server", "start", "--no-ui", "--port", str(self.port)]
        environment = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
        with open(self.home / "server.log", "ab") as log:
            self.process = subprocess.Popen(
                command, env=environment | {"PREFECT_HOME": str(self.home)}, stdout=log, stderr=log
            )
        assert wait_for(lambda: service_state.answers(f"{self.url}/health"))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def states(self, name: str) -> list[str]:
        """The states of the flow runs of that name, in the order in which they started."""
        body = json.dumps({"flow_runs": {"name": {"any_": [name]}}, "sort": "START_TIME_ASC"}).encode()
        request = urllib.request.Request(f"{self.url}/flow_runs/filter", body, {"content-type": "application/json"})
        return [run["state_name"] for run in json.loads(urllib.request.urlopen(request).read())]


def wait_for(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)
    return condition()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("prefect")


@pytest.fixture
def server(home: Path) -> Iterator[Server]:
    found = Server(home)
    yield found
    found.kill()


class Command:
    """`milepost train`, in a session of its own, whose output is in a file."""

    def __init__(self, root: Path, steps: int, settings: list[str], environment: dict[str, str]) -> None:
        command = [MILEPOST, "train", "--run", "gone", "--root", str(root), "--steps", str(steps)]
        command += [word for setting in settings for word in ("--set", setting)]
        inherited = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
        self.log = root / "log"
        self.folder = runs.run_folder(str(root), "gone")
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                command, env=inherited | environment, stdout=log, stderr=log, start_new_session=True
            )

    def steps(self) -> int:
        return len(manifest.finished_steps(self.folder))

    def has_done(self, steps: int) -> bool:
        return wait_for(lambda: self.steps() >= steps or self.process.poll() is not None) and self.steps() >= steps

    def end(self) -> tuple[int, str]:
        code = self.process.wait(DEADLINE_SECONDS)
        return code, self.log.read_text()


Begin = Callable[..., Command]


@pytest.fixture
def begin(tmp_path: Path, model_dir: str, prompts: Callable[..., str]) -> Iterator[Begin]:
    started: list[Command] = []
    settings = [*SETTINGS, f"model.path={model_dir}", f"data.path={prompts()}"]

    def start(steps: int, *more: str, **environment: str) -> Command:
        started.append(Command(tmp_path, steps, [*settings, *more], environment))
        return started[-1]

    yield start
    for command in started:
        if command.process.poll() is None:
            os.killpg(command.process.pid, signal.SIGKILL)


@pytest.mark.long
def test_a_run_outlives_its_prefect_server_and_is_shown_again_once_it_is_back(server: Server, begin: Begin) -> None:
    command = begin(100_000, PREFECT_API_URL=server.url)
    assert command.has_done(2), command.log.read_text()
    server.kill()
    assert command.has_done(command.steps() + 10), command.log.read_text()
    server.start()
    assert wait_for(lambda: "Prefect answers again" in command.log.read_text())
    back = command.steps()
    assert wait_for(lambda: server.states(f"step-{back + 5}") == ["Completed"])
    said = command.log.read_text()
    assert said.count("Prefect does not answer: the run goes on at step") >= 1
    assert "Traceback" not in said and "ERROR" not in said and "Error logging" not in said


@pytest.mark.long
def test_a_killed_run_is_shown_as_crashed_once_it_is_resumed(server: Server, begin: Begin) -> None:
    command = begin(100_000, PREFECT_API_URL=server.url)
    assert command.has_done(2), command.log.read_text()
    os.killpg(command.process.pid, signal.SIGKILL)
    command.process.wait()
    assert server.states("gone")[-1] == "Running"
    steps = command.steps() + 1
    code, said = begin(steps, PREFECT_API_URL=server.url).end()
    assert (code, command.steps()) == (0, steps), said
    assert server.states("gone")[-2:] == ["Crashed", "Completed"]


@pytest.mark.long
def test_a_run_whose_own_prefect_server_dies_ends_well(begin: Begin) -> None:
    command = begin(8)
    assert command.has_done(2), command.log.read_text()
    family = psutil.Process(command.process.pid).children(recursive=True)
    for process in family:
        if "prefect" in process.cmdline() and "server" in process.cmdline():
            process.kill()
    code, said = command.end()
    assert (code, command.steps()) == (0, 8), said
    assert said.count("Prefect does not answer: the run goes on at step") == 1
    assert "the run ended well; Prefect was not told" in said and "Traceback" not in said


@pytest.mark.long
def test_a_run_that_is_told_to_end_while_prefect_is_gone_ends_in_order(server: Server, begin: Begin) -> None:
    command = begin(100_000, PREFECT_API_URL=server.url)
    assert command.has_done(2), command.log.read_text()
    server.kill()
    assert command.has_done(command.steps() + 3), command.log.read_text()
    command.process.terminate()
    code, said = command.end()
    assert code == 143 and "resume with: milepost resume gone" in said and "Traceback" not in said


@pytest.mark.long
def test_a_run_that_fails_while_prefect_is_gone_says_why_it_failed(server: Server, begin: Begin) -> None:
    filtering = ["filter.group=tests.e2e.test_prefect_gone:kill_prefect_and_drop", "filter.on_too_few=fail"]
    known = {"PREFECT_API_URL": server.url, PREFECT_PID: str(server.process.pid)}
    code, said = begin(2, *filtering, **known).end()
    assert code == 1, said
    assert "run 'gone' stopped: step 0 kept 0 of 4 groups" in said and "Traceback" not in said
