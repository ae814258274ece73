"""Commands with a time limit, and nothing of them left: whoever loses its parent becomes a child of this process."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import IO

import psutil

GRACE_SECONDS = 60.0  # for a command to end in good order after SIGTERM
KILL_SECONDS = 30.0
_PR_SET_CHILD_SUBREAPER = 36
_TERMINATED = 128 + signal.SIGTERM


@dataclass(frozen=True)
class Ended:
    """How a command ended; `in_time` is false when it was told to end at its limit."""

    exit_code: int
    seconds: float
    in_time: bool


@contextmanager
def leaving_nothing() -> Iterator[None]:
    """Kill every process that was started here, and what they started, on the way out; SIGTERM is a way out."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        yield
    finally:
        kill_children()
        signal.signal(signal.SIGTERM, before)


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(_TERMINATED)


def kill_children() -> None:
    """SIGKILL until no process of this one's family is left; the dead are reaped, adopted ones too."""
    deadline = time.monotonic() + KILL_SECONDS
    while (family := psutil.Process().children(recursive=True)) and time.monotonic() < deadline:
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(0.1)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def run(
    words: list[str],
    *,
    limit_seconds: float,
    grace_seconds: float = GRACE_SECONDS,
    output: IO[str] | None = None,
    begun: Callable[[psutil.Process], None] | None = None,
) -> Ended:
    """Run a command to its end, or to its limit: then SIGTERM, and SIGKILL for what is still there.

    `begun` is called with its process once it runs.
    """
    started = time.monotonic()
    process = subprocess.Popen(words, stdout=output, stderr=output and subprocess.STDOUT, start_new_session=True)
    in_time = True
    try:
        if begun is not None:
            begun(psutil.Process(process.pid))
        process.wait(max(1.0, limit_seconds))
    except subprocess.TimeoutExpired:
        in_time = False
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(grace_seconds)
        if process.poll() is None:
            process.send_signal(signal.SIGUSR1)  # what it hangs in, into its output
            time.sleep(1)
    finally:
        process.kill()
        process.wait()
        kill_children()
    return Ended(process.returncode, time.monotonic() - started, in_time)
