"""An SGLang server as a process: started in a session of its own, watched, and ended with all its children.

It dies with the process that started it, however that ends (on Linux), and so do its children: those that were just
made when their parent dies would wait for it for ever.
"""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

from milepost.engines.death_signal import death_signal
from milepost.engines.death_watch import DeathWatch
from milepost.engines.sglang_client import SglangRefused, ask

POLL_SECONDS = 0.25
PROBE_SECONDS = 30.0
STOP_SECONDS = 3.0
PORT_TRIES = 3
TAIL_LINES = 4
LINE_CHARACTERS = 300

_PORT_TAKEN = re.compile(r"address already in use|port \d+ is (already )?(in use|not available)", re.IGNORECASE)
_ERROR = re.compile(r"^\s*([\w.]*(Error|Exception|Interrupt)\b.*|[\w. ]+: error: .*)")  # or of a command line


class SglangFailed(RuntimeError):
    """A server ended while it started, or did not become ready in time."""


def log_file(name: str) -> Path:
    """Where the server of the engine called `name` writes, in the state folder; made if it has to be."""
    home = Path(os.environ.get("MILEPOST_HOME") or Path.home() / ".milepost").absolute()
    path = home / "logs" / ("sglang-" + re.sub(r"[^\w.-]", "-", name) + ".log")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


def last_words(log: Path) -> str:
    """The last error that a log names, which a server may have talked over since, and its last lines."""
    text = log.read_text(errors="replace").splitlines()
    lines = [line.strip()[:LINE_CHARACTERS] for line in text if line.strip(" ^~")]  # without a traceback's pointers
    errors = [found[1] for line in lines if (found := _ERROR.match(line))]
    return " | ".join(dict.fromkeys([*errors[-1:], *lines[-TAIL_LINES:]])) or "nothing"


def free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def start_process(command: Sequence[str], environment: Mapping[str, str], log: Path) -> "subprocess.Popen[bytes]":
    """Start a command that ends with the calling thread; the log of the one before is kept beside its own."""
    if log.exists():
        os.replace(log, log.with_suffix(".log.1"))
    with open(log, "wb") as output:
        return subprocess.Popen(
            list(command),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=death_signal() if sys.platform == "linux" else None,
        )


class SglangServer:
    """One running server. `on_death` is called when it ends without having been told to."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        host: str,
        environment: Mapping[str, str],
        log: Path,
        timeout_seconds: float,
        on_death: Callable[[], None],
    ) -> None:
        """Start `command` with a host and a port, and wait until it generates; SglangFailed, and nothing left."""
        self.log = log
        self._on_death = on_death
        self._stopping = False
        deadline = time.monotonic() + timeout_seconds
        for attempt in range(1, PORT_TRIES + 1):
            port = free_port(host)
            self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
            self._launch([*command, "--host", host, "--port", str(port)], environment)
            try:
                self.first_answer = self._wait_ready(deadline, timeout_seconds)
                break
            except SglangFailed as error:
                if attempt == PORT_TRIES or not _PORT_TAKEN.search(str(error)):
                    raise
        self._ready = True
        if self._process.poll() is not None:
            raise SglangFailed(f"the SGLang server ended at once: {last_words(log)}: see {log}")

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self) -> None:
        """Let answers go out, for a few seconds, and end the server with all its children."""
        self._stopping = True
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)
        self._kill()

    def _launch(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """The thread that starts a process is the one that its life hangs on, so it is the one that watches it."""
        self._ready = False
        started: Future[subprocess.Popen[bytes]] = Future()
        watcher = threading.Thread(target=self._run, args=(command, environment, started), daemon=True, name="sglang")
        watcher.start()
        self._process = started.result()

    def _run(
        self, command: Sequence[str], environment: Mapping[str, str], started: "Future[subprocess.Popen[bytes]]"
    ) -> None:
        try:
            process = start_process(command, environment, self.log)
            watch = DeathWatch(process.pid)
        except OSError as error:
            started.set_exception(SglangFailed(f"the SGLang server cannot be started: {error}"))
            return
        started.set_result(process)
        process.wait()
        if self._ready and not self._stopping:
            self._kill()
            self._on_death()
        watch.end()

    def _wait_ready(self, deadline: float, timeout_seconds: float) -> object:
        """The answer to a first request, once there is one."""
        probe = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
        problem = ""
        try:
            while not problem:
                time.sleep(POLL_SECONDS)
                if (code := self._process.poll()) is not None:
                    problem = f"ended with code {code}"
                elif time.monotonic() > deadline:
                    problem = f"was not ready within {timeout_seconds:g} s"
                else:
                    with contextlib.suppress(ConnectionError, SglangRefused):
                        ask(self.url, "/health", timeout_seconds=PROBE_SECONDS)
                        return ask(self.url, "/generate", probe, timeout_seconds=PROBE_SECONDS)
        finally:
            if problem or sys.exc_info()[0]:
                self._kill()
        raise SglangFailed(f"the SGLang server {problem}: {last_words(self.log)}: see {self.log}")

    def _kill(self) -> None:
        """End every process of the session that was made for the server."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)
