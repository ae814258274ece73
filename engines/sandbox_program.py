"""The program of a sandbox: `python -I -m milepost.engines.sandbox_program FOLDER`, with the job as JSON on stdin.

Three processes: this one, which waits; number 1 of the sandbox, which ends it; and the judge, which forks a child for
each case and says what came of it, a line a case after the line `ready`. No code of the job runs in any of the three.
"""

import contextlib
import json
import os
import resource
import select
import shutil
import signal
import sys
import time
from typing import Any

from milepost.engines.namespaces import FREE_IDS, drop_privileges, end_with_parent, has_free_ids, leave_machine
from milepost.engines.sandbox_case import play
from milepost.engines.sandbox_hook import keep_inside
from milepost.engines.sandbox_root import WORK, enter

PROGRAM = "milepost.engines.sandbox_program"
READ_BYTES = 1 << 16
JUDGE = 2  # its process number in a sandbox


def main(folder: str) -> None:
    job = json.load(sys.stdin)
    free_id = FREE_IDS + os.getpid() if has_free_ids() else None
    if not leave_machine():
        os.chdir(folder)
        _judge(job, folder, apart=False)
        return
    first = os.fork()
    if first == 0:
        end_with_parent(signal.SIGKILL)
        _first(job, folder, free_id)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]))


def _first(job: dict[str, Any], folder: str, free_id: int | None) -> None:
    """Set the sandbox up, and end it with the judge: what is number 1 takes all others with it."""
    try:
        enter(folder, size=job["limits"]["disk_bytes"])
    except OSError as error:
        print(f"{error}", file=sys.stderr, flush=True)
        os._exit(1)
    judge = os.fork()
    if judge == 0:
        drop_privileges(free_id)
        _judge(job, WORK, apart=True)
        os._exit(0)
    while os.wait()[0] != judge:
        pass
    os._exit(0)


def _judge(job: dict[str, Any], folder: str, *, apart: bool) -> None:
    limits = job["limits"]
    said = os.fdopen(os.dup(1), "wb", buffering=0)
    with open(os.devnull, "r+b") as nothing:
        for standard in (0, 1, 2):
            os.dup2(nothing.fileno(), standard)
    said.write(b"ready\n")
    deadline = time.monotonic() + limits["seconds"]
    for case in job["cases"]:
        seconds = min(limits["case_seconds"], deadline - time.monotonic())
        outcome = _outcome(job, case, folder, seconds, said.fileno(), apart=apart) if seconds > 0 else _lost("timeout")
        said.write(json.dumps(outcome).encode() + b"\n")


def _lost(reason: str) -> dict[str, Any]:
    return {"value": None, "reason": reason}


def _outcome(
    job: dict[str, Any], case: dict[str, Any], folder: str, seconds: float, secret: int, *, apart: bool
) -> dict[str, Any]:
    """What came of one case. `secret` is the descriptor that the case must not have."""
    reading, writing = os.pipe()
    try:
        child = os.fork()
    except OSError as error:
        os.close(reading)
        os.close(writing)
        return _lost(f"error: {error}")
    if child == 0:
        os.close(reading)
        os.close(secret)
        os.setsid()
        _limit(job["limits"], seconds, apart=apart)
        if not apart:
            keep_inside(folder)
        play(job, case, writing)
    os.close(writing)
    text, reason, status = _watched(child, reading, seconds, job["limits"]["output_bytes"])
    _sweep(child, folder, apart=apart)
    return _lost(reason) if reason else _read(text, status, printed=case["stdin"] is not None)


def _watched(child: int, reading: int, seconds: float, most: int) -> tuple[bytes, str, int]:
    """What a child wrote, why it was stopped if it was, and its exit status; the child is gone afterwards."""
    deadline, text, reason, ended = time.monotonic() + seconds, bytearray(), "", False
    os.set_blocking(reading, False)
    while not reason:
        left = deadline - time.monotonic()
        ready = select.select([reading], [], [], max(0.0, min(left, 0.0 if ended else 0.05)))[0]
        block = os.read(reading, READ_BYTES) if ready else None
        text += block or b""
        if len(text) > most:
            reason = f"printed more than {most} bytes"
        elif block == b"" or (ended and block is None):
            break
        elif left <= 0:
            reason = "timeout"
        # What it has started may hold the pipe open for longer than it lives itself.
        ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    os.close(reading)
    if not reason and not _ends(child, deadline):
        reason = "timeout"
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    return bytes(text), reason, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _ends(child: int, deadline: float) -> bool:
    """Whether a child that has closed its output ends by itself in time."""
    while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def _sweep(child: int, folder: str, *, apart: bool) -> None:
    """End what a case has started, and remove what it has written."""
    if apart and os.getpid() == JUDGE:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)  # of the sandbox's processes all but number 1 and this one
    else:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                os.unlink(entry.path)


def _read(text: bytes, status: int, *, printed: bool) -> dict[str, Any]:
    if printed:
        return _lost(_exit(status)) if status else {"value": text.decode(errors="replace"), "reason": ""}
    try:
        said = json.loads(text)
        return {"value": said["value"], "reason": str(said["reason"])}
    except (ValueError, KeyError, TypeError, RecursionError):
        return _lost(f"ended without a result ({_exit(status)})")


def _exit(status: int) -> str:
    if status >= 0:
        return f"exit code {status}"
    if -status == signal.SIGXCPU:
        return "timeout"
    return f"killed by {signal.Signals(-status).name}"


def _limit(limits: dict[str, Any], seconds: float, *, apart: bool) -> None:
    most = {
        resource.RLIMIT_DATA: limits["memory_bytes"],
        resource.RLIMIT_FSIZE: limits["disk_bytes"],
        resource.RLIMIT_CPU: int(seconds) + 2,
        resource.RLIMIT_NOFILE: 256,
        resource.RLIMIT_CORE: 0,
    }
    if apart:  # elsewhere all processes of the user would count
        most[resource.RLIMIT_NPROC] = limits["processes"]
    for what, value in most.items():
        hard = resource.getrlimit(what)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(what, (value, value))


if __name__ == "__main__":
    main(sys.argv[1])
