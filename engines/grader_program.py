"""The program of a grader process: `python -m milepost.engines.grader_program FD BYTES network|alone`.

It talks lines of JSON over a socket. A line to it holds calls; each is answered with a line as soon as it is made. The
process that was started only minds the one that makes the calls: when that ends or is to end, so does whatever it has
started, in whatever session.
"""

import contextlib
import json
import os
import resource
import signal
import socket
import sys
import time
from types import FrameType
from typing import Any

import psutil

from milepost.engines.namespaces import adopt_orphans, end_with_parent, leave_network, refuse_sockets
from milepost.storage.registry import load_dotted

PROGRAM = "milepost.engines.grader_program"
USE_PATH = f"{PROGRAM}:use_path"
# The kernel ends a grader that outlives its deadline by this much: its caller must have died.
ORPHAN_SECONDS = 10.0


def use_path(path: list[str]) -> None:
    """Import from where the caller imports from."""
    sys.path[:] = [os.path.abspath(entry) for entry in path]


def _serve(connection: socket.socket) -> None:
    with contextlib.suppress(ConnectionResetError, BrokenPipeError), connection.makefile("rb") as requests:
        for line in requests:
            request = json.loads(line)
            for function, args in request["calls"]:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.setitimer(signal.ITIMER_REAL, request["timeout_seconds"] + ORPHAN_SECONDS)
                reply = _reply(function, args)
                signal.setitimer(signal.ITIMER_REAL, 0)
                connection.sendall(reply.encode() + b"\n")


def _reply(function: str, args: list[Any]) -> str:
    started = time.monotonic()
    try:
        value = load_dotted(function, group="function")(*args)
        return json.dumps({"value": value, "reason": None, "seconds": time.monotonic() - started})
    except Exception as error:  # a grader's error is its answer, of whatever type it is
        text = " ".join(str(error).split())[:500]
        reason = f"error: {type(error).__name__}: {text}"
        return json.dumps({"value": None, "reason": reason, "seconds": time.monotonic() - started})


def _limit_memory(size: int) -> None:
    # Data, not address space: libraries map far more than they use.
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (size if hard == resource.RLIM_INFINITY else min(size, hard), hard))


def _mind(grader: int) -> None:
    """Wait for the grader to end, at SIGTERM at once, and leave nothing that it started."""

    def end(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(grader, signal.SIGKILL)

    signal.signal(signal.SIGTERM, end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    while os.wait()[0] != grader:
        pass
    while orphans := psutil.Process().children():  # whoever is killed leaves its own children here
        for orphan in orphans:
            with contextlib.suppress(psutil.NoSuchProcess):
                orphan.kill()
        psutil.wait_procs(orphans)


def main() -> None:
    number, memory_bytes, network = sys.argv[1:]
    connection = socket.socket(fileno=int(number))
    adopt_orphans()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    grader = os.fork()
    if grader:
        connection.close()
        _mind(grader)
        return
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    end_with_parent(signal.SIGKILL)
    if network == "alone" and not leave_network():
        refuse_sockets()
    _limit_memory(int(memory_bytes))
    _serve(connection)


if __name__ == "__main__":
    main()
