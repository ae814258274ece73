"""The servers around a run, on this machine and for this user: Prefect, MLflow and a Ray head.

`up` starts them and `down` ends exactly those; a run that finds no Prefect server has one of its own while it lasts.
"""

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from milepost.flows import launches, service_state
from milepost.flows.launches import Launch
from milepost.flows.service_state import Service
from milepost.storage import files

START_SECONDS = 90.0

Say = Callable[[str], None]
Started = tuple[Service, "subprocess.Popen[bytes]"]


class ServiceFailed(RuntimeError):
    """A service ended, or did not answer in time, while it was being started."""


@dataclass(frozen=True)
class Services:
    """Where the services are that answer; None for others. `prefect_url` ends with `/api`, the pages are without."""

    prefect_url: str | None = None
    mlflow_url: str | None = None
    ray_address: str | None = None


def running() -> Services:
    """The services that `up` started and that answer now; `RAY_ADDRESS` names a Ray cluster that others started."""
    urls = {name: service.url for name, service in service_state.load().items() if _answers(service)}
    return Services(urls.get("prefect"), urls.get("mlflow"), os.environ.get("RAY_ADDRESS") or urls.get("ray"))


def up(root: str, *, say: Say = print, prefect: bool = True, mlflow: bool = True, ray: bool = True) -> Services:
    """Start the services that do not run yet, MLflow's database being in `root`, and say where each of them is.

    Raises ServiceFailed when one cannot be started; the others stay.
    """
    with service_state.locked(START_SECONDS):
        former = {name: service.url for name, service in service_state.load().items()}
        wanted = {
            "prefect": (lambda: launches.prefect_launch(former.get("prefect", ""))) if prefect else None,
            "mlflow": (lambda: launches.mlflow_launch(root, former.get("mlflow", ""))) if mlflow else None,
            "ray": launches.ray_launch if ray else None,
        }
        started = [
            _start_remembered(build())
            for name, build in wanted.items()
            if build is not None and not _say_if_running(name, root, say)
        ]
        for launch, service, process in started:
            _wait_or_forget(launch, service, process)
            say(f"{launch.name} runs at {service.url.removesuffix('/api')}, its log is {service.log}")
    found = running()
    if found.prefect_url:
        _mark_gone(found.prefect_url)
    return found


def down(*, say: Say = print) -> None:
    """End what `up` started, and nothing else."""
    with service_state.locked(START_SECONDS):
        services = service_state.load()
        if not services:
            say("nothing runs")
        for name, service in services.items():
            was_alive = service_state.is_alive(service)
            _end(service)
            _forget(name)
            say(f"{name} stopped" if was_alive else f"{name} had ended by itself: see {service.log}")


@contextlib.contextmanager
def prefect_api(
    *,
    say: Say = print,
    console_level: str = "WARNING",
    meanwhile: Callable[[], object] = lambda: None,
    own: bool = True,
) -> Iterator[str]:
    """The URL of a Prefect API, which flows called inside use: the configured one, that of `up`, or one of its own.

    One of its own ends with this context, and with this process however that ends (on Linux). Prefect's messages below
    `console_level` stay off the terminal; its server has them all the same. `meanwhile` is called while one of its own
    starts, which takes seconds. Where none of its own will do (`own`), ServiceFailed says that there is no other.
    """
    with contextlib.ExitStack() as stack:
        url = _configured_api() or running().prefect_url
        starts = url is None
        if url is None:
            if not own:
                raise ServiceFailed("no Prefect server runs: start one with `milepost up`, or set PREFECT_API_URL")
            url = stack.enter_context(_own_prefect(say, meanwhile))
        from milepost.flows.prefect_client import prefect_client  # imports Prefect, for which `down` need not wait

        stack.enter_context(prefect_client(url, console_level, drain=starts))
        _mark_gone(url)
        yield url


def _mark_gone(url: str) -> None:
    from milepost.flows.crashed import mark_gone  # imports Prefect, for which `down` need not wait

    mark_gone(url)


def _answers(service: Service) -> bool:
    probe = f"{service.url}/health" if service.url.startswith("http") else service.url
    return service_state.is_alive(service) and service_state.answers(probe)


def _say_if_running(name: str, root: str, say: Say) -> bool:
    """Whether a service runs already; what a dead one left is cleared away."""
    service = service_state.load().get(name)
    if service is None:
        return False
    if not service_state.is_alive(service):
        _end(service)
        _forget(name)
        return False
    _wait_answer(service)
    other = service.root not in ("", launches.local_folder(root))
    hint = f" with the database of {service.root}: run `milepost down` first to change it" if other else ""
    say(f"{name} already runs at {service.url.removesuffix('/api')}{hint}")
    return True


def _wait_answer(service: Service) -> None:
    """Give a busy or a starting service its time; ending one that somebody uses is for its user to decide."""
    deadline = time.monotonic() + START_SECONDS
    while not _answers(service):
        if time.monotonic() > deadline:
            there = f"{service.name} is there (pid {service.pid}) and does not answer"
            raise ServiceFailed(f"{there}: run `milepost down` and `milepost up` again, or see {service.log}")
        time.sleep(service_state.POLL_SECONDS)


def _start(launch: Launch, *, dies_with_parent: bool = False) -> Started:
    return service_state.launch(
        launch.name,
        launch.command,
        url=launch.url,
        environment=launch.environment,
        root=launch.root,
        scratch=launch.scratch,
        dies_with_parent=dies_with_parent,
    )


def _start_remembered(launch: Launch) -> "tuple[Launch, Service, subprocess.Popen[bytes]]":
    service, process = _start(launch)
    service_state.save(service_state.load() | {launch.name: service})
    return launch, service, process


def _forget(name: str) -> None:
    service_state.save({other: service for other, service in service_state.load().items() if other != name})


def _end(service: Service) -> None:
    service_state.stop(service)
    if service.scratch:
        files.remove_folder(service.scratch)


def _is_ready(launch: Launch) -> bool:
    return (not launch.ready_file or Path(launch.ready_file).exists()) and service_state.answers(launch.probe)


def _wait_ready(launch: Launch, service: Service, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + START_SECONDS
    while not _is_ready(launch):
        problem = f"did not answer within {START_SECONDS:g} s" if time.monotonic() > deadline else ""
        if process.poll() is not None:
            problem = f"ended with code {process.returncode}"
        if problem:
            said = service_state.last_words(service)
            raise ServiceFailed(f"{launch.name} {problem}, its last words were {said!r}: see {service.log}")
        time.sleep(service_state.POLL_SECONDS)


def _wait_or_forget(launch: Launch, service: Service, process: "subprocess.Popen[bytes]") -> None:
    try:
        _wait_ready(launch, service, process)
    except ServiceFailed:
        _end(service)
        _forget(launch.name)
        raise


@contextlib.contextmanager
def _own_prefect(say: Say, meanwhile: Callable[[], object]) -> Iterator[str]:
    """A Prefect server for as long as this context; starts are one at a time because they share a database."""
    with service_state.locked(2 * START_SECONDS):
        launch = launches.own_prefect_launch()
        say("no Prefect server runs, so this run starts its own; `milepost up` keeps one with its pages")
        service, process = _start(launch, dies_with_parent=True)
        try:
            meanwhile()
            _wait_ready(launch, service, process)
        except BaseException:  # an interrupt too must not leave the server behind
            _end(service)
            raise
    try:
        yield launch.url
    finally:
        _end(service)
        process.wait()


def _configured_api() -> str | None:
    """The API that the environment or the Prefect profile names; ServiceFailed when nothing answers there."""
    from prefect.settings import get_current_settings  # takes a second, which `up` and `down` need not pay

    url = get_current_settings().api.url
    if url and not service_state.answers(f"{url}/health", timeout_seconds=10):
        raise ServiceFailed(f"PREFECT_API_URL is {url} and nothing answers there: start that server, or unset it")
    return url
