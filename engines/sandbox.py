"""Runs Python code that nobody trusts: each case in a process of its own, with limits, and nothing around it.

What expected answers are never enters the sandbox: it says what the code printed or returned, and its caller compares.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from milepost.engines.sandbox_program import PROGRAM

GRACE_SECONDS = 5.0  # for the sandbox to start, and to say what came of the last case
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
}


@dataclass(frozen=True)
class Limits:
    """What the code may take: `case_seconds` and the memory of a process in each case, `seconds` for all of them."""

    seconds: float = 8.0
    case_seconds: float = 4.0
    memory_bytes: int = 1024**3
    processes: int = 16
    disk_bytes: int = 64 * 1024**2
    output_bytes: int = 4 * 1024**2


@dataclass(frozen=True)
class Case:
    """One use of the code: as a program that reads `stdin`, by `call` of a function with `args`, or by a `test`.

    A test is Python source that runs behind the code; `returns` makes it an expression whose value is wanted.
    """

    stdin: str | None = None
    call: str = ""
    args: tuple[Any, ...] = ()
    test: str = ""
    returns: bool = False


@dataclass(frozen=True)
class Outcome:
    """What came of a case: what was printed, or the value as `plain` has it; neither where there is a reason."""

    value: Any = None
    reason: str = ""


def run(code: str, cases: Sequence[Case], limits: Limits, *, preamble: str = "") -> list[Outcome]:
    """An outcome for each case, in order. RuntimeError when the sandbox itself does not work.

    `preamble` runs before the code where it is called or tested, not where it is a program.
    """
    job = {"code": code, "preamble": preamble, "cases": [asdict(case) for case in cases], "limits": asdict(limits)}
    with tempfile.TemporaryDirectory(prefix="milepost-sandbox-") as folder:
        lines, error = _run(folder, json.dumps(job).encode(), limits)
    if not lines:
        raise RuntimeError(f"the sandbox did not start: {error.strip()[-300:] or 'it gave no reason'}")
    found = [Outcome(**json.loads(line)) for line in lines[1:]]
    return found + [Outcome(reason="the sandbox was killed from inside")] * (len(cases) - len(found))


def _run(folder: str, job: bytes, limits: Limits) -> tuple[list[bytes], str]:
    """The whole lines that the sandbox wrote, however it ended, and what it said of itself."""
    process = subprocess.Popen(
        [sys.executable, "-I", "-m", PROGRAM, folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=folder,
        env=ENVIRONMENT,
        start_new_session=True,
    )
    with process:
        try:
            out, error = process.communicate(job, timeout=limits.seconds + GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            out, error = process.communicate()
        finally:
            process.kill()
    return out.split(b"\n")[:-1], error.decode(errors="replace")
