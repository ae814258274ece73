"""Work in a thread of its own is waited for by the flow alone, and by nobody at the end of the process."""

import asyncio
import subprocess
import sys
from contextvars import ContextVar

import pytest

from milepost.flows.own_thread import in_own_thread

WAITS = """
import asyncio, time
from milepost.flows.own_thread import in_own_thread

try:
    asyncio.run(asyncio.wait_for(in_own_thread(time.sleep, 600), 0.1))
except TimeoutError:
    print("given up")
"""

name: ContextVar[str] = ContextVar("name")


def test_it_returns_or_raises_what_the_work_does_in_the_context_of_the_flow() -> None:
    name.set("flow")
    assert asyncio.run(in_own_thread(name.get)) == "flow"
    with pytest.raises(ValueError, match="no number"):
        asyncio.run(in_own_thread(_fail, text="no number"))


def _fail(text: str) -> None:
    raise ValueError(text)


def test_a_process_ends_while_the_work_goes_on() -> None:
    ended = subprocess.run([sys.executable, "-c", WAITS], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "given up\n", "")
