"""A process that runs named functions under a deadline and a memory limit: whatever they do, there is an answer.

It is a program of its own (engines/grader_program.py), so it needs nothing of the caller's main module, and a grader
that prints, forks, exits or crashes harms nobody.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from milepost.engines.grader_program import PROGRAM, USE_PATH

MEMORY_BYTES = 4 * 1024**3
START_SECONDS = 60.0
MAX_TIMEOUT_SECONDS = 24 * 3600.0  # timers overflow after some weeks
END_SECONDS = 5.0  # for what a grader has started to be found and ended
RETRIES_AFTER_CRASH = 1
LOT_SECONDS = 0.2  # calls are sent in lots that take about this long, so that slow ones still spread over the processes
MAX_LOT = 64
LOT_GROWTH = 8


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


def lot_size(before: int, answers: Sequence[Answer]) -> int:
    """How many calls to send next to a process that was sent `before` of them and gave `answers`."""
    slowest = max(answer.seconds for answer in answers)
    return max(1, min(LOT_GROWTH * before, MAX_LOT, int(LOT_SECONDS / max(slowest, 1e-6))))


class GraderProcess:
    """One process, started on the first call and again after each one that was killed; calls from threads queue up."""

    def __init__(self, *, memory_bytes: int = MEMORY_BYTES, network: bool = False) -> None:
        self.answered = 0  # one that does not grow while calls wait means that this object is stuck
        self._limits = [str(memory_bytes), "network" if network else "alone"]
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._replies: BinaryIO | None = None
        self._warm: set[str] = set()  # calls as they are sent
        self._lock = threading.Lock()

    def ask(self, call: Call, *, timeout_seconds: float, warm_up: Call | None = None) -> Answer:
        """The answer to one call; see `ask_all`."""
        return self.ask_all([call], timeout_seconds=timeout_seconds, warm_up=warm_up)[0]

    def ask_all(self, calls: Sequence[Call], *, timeout_seconds: float, warm_up: Call | None = None) -> list[Answer]:
        """The answer to each call, in order, each within `timeout_seconds` of the answer before it.

        `warm_up` runs first, once in each process and outside the deadline, so that imports are on nobody's clock. A
        call that hangs or ends its process costs no other: those behind it are made in a new one. A crash is tried
        again, because it may have come from outside.
        """
        texts = [_text(call) for call in calls]
        sent = [text for text in texts if isinstance(text, str)]
        with self._lock:
            answers = iter(self._answers(sent, min(timeout_seconds, MAX_TIMEOUT_SECONDS), warm_up))
        return [next(answers) if isinstance(text, str) else text for text in texts]

    def close(self) -> None:
        """End the process, whatever it is doing, and all that it has started."""
        process, connection, replies = self._process, self._socket, self._replies
        self._process = self._socket = self._replies = None
        self._warm = set()
        if replies is not None:
            replies.close()
        if connection is not None:
            connection.close()
        if process is not None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _answers(self, calls: list[str], timeout_seconds: float, warm_up: Call | None) -> list[Answer]:
        answers: list[Answer] = []
        crashes = 0  # of the call after the answers
        while len(answers) < len(calls):
            found, lost = self._attempt(calls[len(answers) :], timeout_seconds, warm_up)
            answers += found
            crashes = 0 if found else crashes
            if lost is None:
                continue
            crashes += lost.reason == "crash"
            if lost.reason != "crash" or crashes > RETRIES_AFTER_CRASH:
                answers.append(lost)
                crashes = 0
        return answers

    def _attempt(
        self, calls: list[str], timeout_seconds: float, warm_up: Call | None
    ) -> tuple[list[Answer], Answer | None]:
        """The answers of one process up to the call that it was lost with, and that call's; None when it was not."""
        answers: list[Answer] = []
        since = time.monotonic()
        try:
            refused = self._refused(warm_up)
            if refused is not None:
                return [refused] * len(calls), None
            for answer in self._exchange(calls, timeout_seconds):
                answers.append(answer)
                self.answered += 1
                since = time.monotonic()
        except (_Died, TimeoutError) as error:
            self.close()
            reason = "crash" if isinstance(error, _Died) else "timeout"
            return answers, Answer(None, reason, time.monotonic() - since)
        except BaseException:  # answers that nobody waits for would be taken for those to other calls
            self.close()
            raise
        return answers, None

    def _refused(self, warm_up: Call | None) -> Answer | None:
        """Why this process cannot be warmed up, if it cannot."""
        for first in (Call(USE_PATH, (sys.path,)), warm_up):
            text = None if first is None else _text(first)
            if isinstance(text, Answer):
                return text
            if text is not None and text not in self._warm:
                (answer,) = self._exchange([text], START_SECONDS)
                if answer.reason is not None:
                    return answer
                self._warm.add(text)
        return None

    def _exchange(self, calls: list[str], timeout_seconds: float) -> Iterator[Answer]:
        """Send calls at once, and take their answers one by one as they come."""
        connection, replies = self._connected()
        connection.settimeout(timeout_seconds)
        try:
            connection.sendall(f'{{"timeout_seconds": {timeout_seconds}, "calls": [{", ".join(calls)}]}}\n'.encode())
            for _ in calls:
                line = replies.readline()
                if not line.endswith(b"\n"):
                    raise _Died
                yield Answer(**json.loads(line))
        except (BrokenPipeError, ConnectionResetError):
            raise _Died from None

    def _connected(self) -> tuple[socket.socket, BinaryIO]:
        if self._socket is None or self._replies is None:
            ours, theirs = socket.socketpair()
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", PROGRAM, str(theirs.fileno()), *self._limits],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=2,
                    start_new_session=True,
                )
            self._socket, self._replies = ours, ours.makefile("rb")
        return self._socket, self._replies


def _text(call: Call) -> str | Answer:
    """A call as it is sent; the answer to it when it cannot be."""
    try:
        return json.dumps([call.function, call.args])
    except (TypeError, ValueError) as error:
        return Answer(None, f"error: {type(error).__name__}: {error}", 0.0)
