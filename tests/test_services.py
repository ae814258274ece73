"""Real servers in the background: what is started, how it is found, and that nothing else is ever ended."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.settings.models.server.services import ServerServicesDBVacuumSettings

from milepost.flows import launches, service_state, services

pytestmark = pytest.mark.slow

PYTHON = sys.executable
PARENT = "import subprocess; c = subprocess.Popen(['sleep', '600'], {options}); print(c.pid, flush=True); c.wait()"


def quiet(_: str) -> None:
    """Say nothing."""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A state folder of the test's own, and no Prefect API but what the test starts."""
    monkeypatch.setenv("MILEPOST_HOME", str(tmp_path / "home"))
    for name in ("PREFECT_API_URL", "PREFECT_HOME"):
        monkeypatch.delenv(name, raising=False)
    with temporary_settings(restore_defaults={PREFECT_API_URL}):
        yield tmp_path / "home"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """The state folder and the root of a Prefect server, an MLflow server and a Ray head that run."""
    home, root = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("root")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MILEPOST_HOME", str(home))
        services.up(str(root), say=quiet)
    yield home, root
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MILEPOST_HOME", str(home))
        services.down(say=quiet)


@pytest.fixture
def up(shared: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of the shared services, whose state folder is the one in use."""
    monkeypatch.setenv("MILEPOST_HOME", str(shared[0]))
    return shared[1]


@pytest.fixture
def bystander() -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen([PYTHON, "-c", "import time; time.sleep(600)"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


def launched(code: str) -> service_state.Service:
    return service_state.launch("test", [PYTHON, "-c", code], url="127.0.0.1:9", environment=os.environ)[0]


def first_line(path: str) -> str:
    while "\n" not in (text := Path(path).read_text()):
        pass
    return text.splitlines()[0]


def test_up_starts_three_services_on_this_machine_and_says_where_they_are(up: Path) -> None:
    found = services.running()
    assert found.prefect_url and found.prefect_url.startswith("http://127.0.0.1:")
    assert urllib.request.urlopen(f"{found.prefect_url}/health").read() == b"true"
    assert urllib.request.urlopen(f"{found.mlflow_url}/health").read() == b"OK"
    assert (up / "mlflow.db").is_file()


def test_up_again_starts_nothing_and_says_what_runs(up: Path, tmp_path: Path) -> None:
    before, said = service_state.load(), []
    services.up(str(tmp_path / "other"), say=said.append)
    assert service_state.load() == before
    assert len(said) == 3 and all("already runs at" in line for line in said)
    assert f"with the database of {up}" in said[1]


def test_a_page_from_elsewhere_may_not_read_the_prefect_server(up: Path) -> None:
    url = str(services.running().prefect_url)
    foreign = urllib.request.Request(f"{url}/health", headers={"Origin": "http://evil.example"})
    own = urllib.request.Request(f"{url}/health", headers={"Origin": url.removesuffix("/api")})
    assert urllib.request.urlopen(foreign).headers["access-control-allow-origin"] is None
    assert urllib.request.urlopen(own).headers["access-control-allow-origin"] == url.removesuffix("/api")


def test_the_ray_head_takes_work_from_those_who_have_its_token(up: Path) -> None:
    code = (
        "import sys; from milepost.engines import cluster; cluster.connect(sys.argv[1])\n"
        "import ray; print(ray.get(ray.remote(num_cpus=1)(lambda: 6 * 7).remote()))"
    )
    done = subprocess.run([PYTHON, "-c", code, str(services.running().ray_address)], capture_output=True, text=True)
    assert done.stdout.strip() == "42", done.stderr


def test_a_flow_uses_the_prefect_server_of_up(up: Path) -> None:
    from prefect import flow, get_client

    @flow
    async def names() -> list[str]:
        async with get_client() as client:
            return [str(client.api_url), *[run.name for run in await client.read_flow_runs()]]

    with services.prefect_api(say=quiet) as url:
        seen = asyncio.run(names())
    assert url == services.running().prefect_url and url in seen[0] and len(seen) == 2
    assert "PREFECT_API_URL" not in os.environ


def test_a_run_without_a_prefect_server_has_its_own_while_it_lasts(home: Path) -> None:
    from prefect import flow

    said: list[str] = []
    with services.prefect_api(say=said.append) as url:
        assert flow(lambda: 7, name="seven")() == 7
        counted = urllib.request.Request(f"{url}/flow_runs/count", b"{}", {"content-type": "application/json"})
        assert json.loads(urllib.request.urlopen(counted).read()) == 1
        assert services.running() == services.Services()
    assert not service_state.answers(f"{url}/health")
    assert "starts its own" in said[0]


def test_an_api_that_is_configured_and_does_not_answer_is_named() -> None:
    from prefect.settings import PREFECT_API_URL, temporary_settings

    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        with pytest.raises(services.ServiceFailed, match=r"PREFECT_API_URL is http://127\.0\.0\.1:9/api"):
            with services.prefect_api(say=quiet):
                pass


def test_a_service_that_cannot_start_is_reported_with_its_last_words_and_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_SERVER_DATABASE_CONNECTION_URL", "nonsense")
    with pytest.raises(services.ServiceFailed, match="prefect ended with code 1, its last words were"):
        services.up(str(tmp_path), say=quiet, mlflow=False, ray=False)
    assert service_state.load() == {}


def test_a_root_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot hold MLflow's database"):
        services.up(str(tmp_path / "file" / "runs"), say=quiet, prefect=False, ray=False)


def test_down_ends_its_services_with_their_children_and_nothing_else(bystander: "subprocess.Popen[bytes]") -> None:
    service = launched(PARENT.format(options="start_new_session=True"))
    child = psutil.Process(int(first_line(service.log)))
    service_state.save({"test": service})
    services.down(say=quiet)
    assert not service_state.is_alive(service) and not child.is_running()
    assert bystander.poll() is None and service_state.load() == {}


def test_a_pid_that_belongs_to_another_process_now_is_left_alone(bystander: "subprocess.Popen[bytes]") -> None:
    created = psutil.Process(bystander.pid).create_time()
    service = service_state.Service("test", bystander.pid, created - 3600, "token", "127.0.0.1:9", "log", "")
    assert not service_state.is_alive(service) and service_state.processes(service) == []
    service_state.stop(service)
    assert bystander.poll() is None


def test_children_of_a_service_that_died_are_still_found() -> None:
    service = launched(PARENT.format(options=""))
    orphan = psutil.Process(int(first_line(service.log)))
    os.kill(service.pid, signal.SIGKILL)
    os.waitpid(service.pid, 0)
    assert not service_state.is_alive(service) and orphan in service_state.processes(service)
    assert service_state.processes(replace(service, token="another")) == []
    service_state.stop(service)
    assert not orphan.is_running()


def test_a_service_that_ignores_being_asked_is_killed() -> None:
    ignore = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    service = launched(f"{ignore}; print('deaf', flush=True); time.sleep(600)")
    assert first_line(service.log) == "deaf"
    service_state.stop(service, grace_seconds=0.2)
    assert not service_state.is_alive(service)


def test_what_a_run_starts_for_itself_dies_with_it_however_it_ends() -> None:
    code = (
        "import os, time; from milepost.flows import service_state as s\n"
        "command = ['sleep', '600']; where = '127.0.0.1:9'\n"
        "service, _ = s.launch('own', command, url=where, environment=os.environ, dies_with_parent=True)\n"
        "print(service.pid, flush=True); time.sleep(600)"
    )
    run = subprocess.Popen([PYTHON, "-c", code], stdout=subprocess.PIPE, text=True)
    assert run.stdout
    child = psutil.Process(int(run.stdout.readline()))
    run.kill()
    run.communicate()
    psutil.wait_procs([child], timeout=30)
    assert not child.is_running()


def test_a_taken_port_gives_way_to_a_free_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setattr(launches, "PREFECT_PORT", taken.getsockname()[1])
        assert not launches.prefect_launch().url.endswith(f":{launches.PREFECT_PORT}/api")
    assert launches.prefect_launch().url.endswith(f":{launches.PREFECT_PORT}/api")


def test_a_server_that_is_started_again_is_where_the_one_that_died_was() -> None:
    (port,) = service_state.free_ports(1)
    former = f"http://{launches.HOST}:{port}/api"
    assert launches.prefect_launch(former).url == former
    with socket.socket() as taken:
        taken.bind((launches.HOST, port))
        taken.listen()
        assert launches.prefect_launch(former).url != former


def test_a_token_is_made_once_and_for_its_owner_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "ray" / "token"))
    launches.ensure_ray_token()
    token = launches.ray_token_file().read_text()
    launches.ensure_ray_token()
    assert launches.ray_token_file().read_text() == token and len(token) == 64
    assert launches.ray_token_file().stat().st_mode & 0o077 == 0


def test_a_damaged_state_file_is_named(home: Path) -> None:
    service_state.state_folder()
    (home / "services.json").write_text('{"prefect": {"pid": 1}}')
    with pytest.raises(ValueError, match=r"services\.json cannot be read"):
        services.running()


def test_a_service_that_is_there_and_does_not_answer_is_not_ended_behind_its_users_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "START_SECONDS", 0.1)
    service = launched("import time; time.sleep(600)")
    service_state.save({"prefect": service})
    with pytest.raises(services.ServiceFailed, match="does not answer: run `milepost down`"):
        services.up(str(tmp_path), say=quiet, mlflow=False, ray=False)
    assert service_state.is_alive(service)
    services.down(say=quiet)
    assert not service_state.is_alive(service)


def test_down_with_nothing_running_says_so() -> None:
    said: list[str] = []
    services.down(say=said.append)
    assert said == ["nothing runs"]


def test_the_server_keeps_events_of_task_runs_for_minutes_and_all_others_for_days(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in launches.prefect_launch().environment.items():
        if name.startswith("PREFECT_SERVER_SERVICES_DB_VACUUM"):
            monkeypatch.setenv(name, value)
    found = ServerServicesDBVacuumSettings()
    soon = timedelta(seconds=launches.TASK_EVENT_SECONDS)
    assert found.event_retention_overrides == dict.fromkeys(launches.TASK_EVENTS, soon)
    assert found.loop_seconds == launches.TASK_EVENT_SECONDS and found.enabled_vacuum_types == {"events"}
