"""One process in the background: started, probed, remembered and stopped.

A process is known by its pid and the time it was created, so that a pid that is another's now is never stopped. Each
gets a session of its own and a token in its environment, by which its descendants are known when it is gone.
"""

import contextlib
import fcntl
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from milepost.engines.death_signal import death_signal
from milepost.storage import files

TOKEN = "MILEPOST_SERVICE"
STOP_SECONDS = 10.0
POLL_SECONDS = 0.05

_CREATED_TOLERANCE = 2.0  # seconds by which the clock's correction may move a creation time


@dataclass(frozen=True)
class Service:
    """A running service. `url` is `http://...` or `host:port`; `scratch` is a folder that ends with it, or empty."""

    name: str
    pid: int
    created: float
    token: str
    url: str
    log: str
    root: str
    scratch: str = ""


def state_folder() -> Path:
    """`$MILEPOST_HOME`, or `~/.milepost`; made when it is not there, for its owner only."""
    folder = Path(os.environ.get("MILEPOST_HOME") or Path.home() / ".milepost").absolute()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def load() -> dict[str, Service]:
    """Every service that was started and not stopped, by name; some may have died since."""
    path = state_folder() / "services.json"
    if not path.exists():
        return {}
    try:
        return {name: Service(**entry) for name, entry in files.read_json(str(path)).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} cannot be read ({error}): end its processes by hand and remove it") from error


def save(services: Mapping[str, Service]) -> None:
    path = state_folder() / "services.json"
    if services:
        content = {name: asdict(service) for name, service in services.items()}
        files.publish_json(str(path), content, overwrite=True)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(timeout_seconds: float) -> Iterator[None]:
    """One process at a time starts and stops services; the lock goes with the process that holds it."""
    with open(state_folder() / "lock", "w") as file:
        deadline = time.monotonic() + timeout_seconds
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"another process still starts or stops services after {timeout_seconds:g} s: see {file.name}"
                    ) from None
                time.sleep(POLL_SECONDS)
        yield


def port_is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def free_ports(count: int) -> list[int]:
    """Different ports that the system says are free."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def answers(url: str, *, timeout_seconds: float = 5.0) -> bool:
    """Whether an HTTP server answers at `url`, or anything accepts a connection at a `host:port`."""
    try:
        if url.startswith(("http://", "https://")):
            urllib.request.urlopen(url, timeout=timeout_seconds).close()
        else:
            host, _, port = url.rpartition(":")
            socket.create_connection((host, int(port)), timeout=timeout_seconds).close()
    except urllib.error.HTTPError as error:
        return error.code < 500
    except (OSError, ValueError):
        return False
    return True


def launch(
    name: str,
    command: Sequence[str],
    *,
    url: str,
    environment: Mapping[str, str],
    root: str = "",
    scratch: str = "",
    dies_with_parent: bool = False,
) -> tuple[Service, subprocess.Popen[bytes]]:
    """Start `command` in a session of its own, its output appended to a log in the state folder.

    With `dies_with_parent` the kernel kills it (Linux) when the thread that calls this ends, however that happens.
    """
    token = uuid.uuid4().hex
    log = state_folder() / "logs" / f"{name}.log"
    log.parent.mkdir(exist_ok=True)
    with open(log, "ab") as output:
        process = subprocess.Popen(
            list(command),
            env={**environment, TOKEN: token},
            cwd=state_folder(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=death_signal() if dies_with_parent and sys.platform == "linux" else None,
        )
    created = psutil.Process(process.pid).create_time()
    return Service(name, process.pid, created, token, url, str(log), root, scratch), process


def last_words(service: Service) -> str:
    """The last line of the log that says something."""
    lines = Path(service.log).read_text(errors="replace").splitlines() if Path(service.log).exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "nothing")


def is_alive(service: Service) -> bool:
    return _leader(service) is not None


def _leader(service: Service) -> psutil.Process | None:
    """The process that was started, unless it is gone or its pid is another's now."""
    try:
        process = psutil.Process(service.pid)
        same = abs(process.create_time() - service.created) < _CREATED_TOLERANCE
        return process if same and process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.NoSuchProcess:
        return None


def processes(service: Service) -> list[psutil.Process]:
    """Every living process of a service: the one started, its session, and all their descendants."""
    leader = _leader(service)
    found = {} if leader is None else {leader.pid: leader}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if os.getsid(process.pid) == service.pid and (leader or process.environ().get(TOKEN) == service.token):
                found[process.pid] = process
    for process in list(found.values()):
        with contextlib.suppress(psutil.Error):
            found |= {child.pid: child for child in process.children(recursive=True)}
    return list(found.values())


def stop(service: Service, *, grace_seconds: float = STOP_SECONDS) -> None:
    """End a service and its descendants, and nothing else: asked first, killed after `grace_seconds`."""
    leader = _leader(service)
    members = processes(service)
    for group in ([leader] if leader else [], members):  # the first one ends its children in the order it knows
        _ask_to_end(group, grace_seconds)
    left = {process.pid: process for process in [*members, *processes(service)] if process.is_running()}
    for process in left.values():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(list(left.values()), timeout=grace_seconds)


def _ask_to_end(group: Sequence[psutil.Process], grace_seconds: float) -> None:
    for process in group:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    psutil.wait_procs(group, timeout=grace_seconds)
