"""Which means there are on this machine to keep graded code in: `python -m milepost.engines.isolation` tries them.

The kernel's hold against any program. Where it forbids them, audit hooks refuse the same to Python code only.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass

from milepost.engines.namespaces import leave_machine, leave_network
from milepost.engines.sandbox_root import enter

PROBE_SECONDS = 30.0


@dataclass(frozen=True)
class Isolation:
    """Whether the kernel keeps graders from the network, and the code of responses from the rest of the machine."""

    network: bool
    sandbox: bool


def probe() -> Isolation:
    """What the kernel allows here, tried in a process of its own."""
    command = [sys.executable, "-I", "-m", __name__]
    found = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS, check=True)
    return Isolation(**json.loads(found.stdout))


def _tried(step: Callable[[], bool]) -> bool:
    """Whether a function says True in a child of this process."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if step() else 1)
        except OSError:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:

        def entered() -> bool:
            enter(folder, size=2**20)
            return True

        sandbox = _tried(lambda: leave_machine() and _tried(entered))
    print(json.dumps(asdict(Isolation(network=_tried(leave_network), sandbox=sandbox))))


if __name__ == "__main__":
    main()
