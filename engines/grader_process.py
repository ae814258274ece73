"""A process that runs named functions under a deadline and a memory limit: whatever they do, there is an answer.

It is a program of its own and talks JSON over a socket, so it needs nothing of the caller's main module, and a grader
that prints, forks, exits or crashes harms nobody. Run as `python -m milepost.engines.grader_process FD`.
"""

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from milepost.storage.registry import load_dotted

MEMORY_BYTES = 4 * 1024**3
START_SECONDS = 60.0
MAX_TIMEOUT_SECONDS = 24 * 3600.0  # timers overflow after some weeks
# The kernel ends a grader that outlives its deadline by this much: its caller must have died.
ORPHAN_SECONDS = 10.0
RETRIES_AFTER_CRASH = 1


@dataclass(frozen=True)
class Call:
    """A function by name, `pkg.mod:fn`, and its positional arguments, which are JSON."""

    function: str
    args: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Answer:
    """What a call returned, or why it did not: `timeout`, `crash` or `error: TYPE: TEXT`."""

    value: Any
    reason: str | None
    seconds: float


class _Died(Exception):
    """The process ended without an answer."""


class GraderProcess:
    """One process, started on the first call and again after each one that was killed; calls from threads queue up."""

    def __init__(self, *, memory_bytes: int = MEMORY_BYTES) -> None:
        self._memory_bytes = memory_bytes
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._warm: set[str] = set()  # calls by repr: their arguments need not hash
        self._lock = threading.Lock()

    def ask(self, call: Call, *, timeout_seconds: float, warm_up: Call | None = None) -> Answer:
        """The answer to `call` within `timeout_seconds`.

        `warm_up` runs before it, once in each process and outside the deadline, so that imports are on nobody's clock.
        A crash is tried again in a new process, because it may have come from outside.
        """
        try:
            json.dumps(call.args)
        except (TypeError, ValueError) as error:
            return Answer(None, f"error: {type(error).__name__}: {error}", 0.0)
        timeout_seconds = min(timeout_seconds, MAX_TIMEOUT_SECONDS)
        with self._lock:
            for _ in range(RETRIES_AFTER_CRASH):
                answer = self._attempt(call, timeout_seconds, warm_up)
                if answer.reason != "crash":
                    return answer
            return self._attempt(call, timeout_seconds, warm_up)

    def close(self) -> None:
        """End the process, whatever it is doing."""
        process, connection = self._process, self._connection
        self._process = self._connection = None
        self._warm = set()
        if connection is not None:
            connection.close()
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _attempt(self, call: Call, timeout_seconds: float, warm_up: Call | None) -> Answer:
        started = time.monotonic()
        try:
            for first in (Call(f"{__name__}:use_path", (sys.path,)), warm_up):
                if first is not None and repr(first) not in self._warm:
                    answer = self._exchange(first, START_SECONDS)
                    if answer.reason is not None:
                        return answer
                    self._warm.add(repr(first))
            return self._exchange(call, timeout_seconds)
        except (_Died, TimeoutError) as error:
            self.close()
            reason = "crash" if isinstance(error, _Died) else "timeout"
            return Answer(None, reason, time.monotonic() - started)

    def _exchange(self, call: Call, timeout_seconds: float) -> Answer:
        connection = self._connection or self._start()
        request = json.dumps({"function": call.function, "args": call.args, "timeout_seconds": timeout_seconds})
        started = time.monotonic()
        try:
            connection.send_bytes(request.encode())
            if not connection.poll(timeout_seconds):
                raise TimeoutError
            reply = json.loads(connection.recv_bytes())
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise _Died from None
        return Answer(reply["value"], reply["reason"], time.monotonic() - started)

    def _start(self) -> Connection:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno()), str(self._memory_bytes)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,
                start_new_session=True,
            )
        self._connection = Connection(ours.detach())
        return self._connection


def use_path(path: list[str]) -> None:
    """Import from where the caller imports from."""
    sys.path[:] = [os.path.abspath(entry) for entry in path]


def _serve(connection: Connection) -> None:
    while True:
        try:
            request = json.loads(connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            return
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, request["timeout_seconds"] + ORPHAN_SECONDS)
        reply = _reply(request["function"], request["args"])
        signal.setitimer(signal.ITIMER_REAL, 0)
        connection.send_bytes(reply.encode())


def _reply(function: str, args: list[Any]) -> str:
    try:
        value = load_dotted(function, group="function")(*args)
        return json.dumps({"value": value, "reason": None})
    except Exception as error:  # a grader's error is its answer, of whatever type it is
        text = " ".join(str(error).split())[:500]
        return json.dumps({"value": None, "reason": f"error: {type(error).__name__}: {text}"})


def _limit_memory(size: int) -> None:
    # Data, not address space: libraries map far more than they use.
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (size if hard == resource.RLIM_INFINITY else min(size, hard), hard))


if __name__ == "__main__":
    _limit_memory(int(sys.argv[2]))
    _serve(Connection(int(sys.argv[1])))
