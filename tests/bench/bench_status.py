"""How long `milepost status` takes with many runs in the root, as a process of its own.

python tests/bench/bench_status.py [RUNS] [STEPS]
"""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from made_run import add_step, begin_run

REPEATS = 3


def fill(root: Path, count: int, steps: int) -> None:
    """`count` runs of `steps` steps each, copies of one."""
    made = begin_run(str(root))
    for step in range(steps):
        add_step(made, step)
    record = json.loads(Path(made.folder.record).read_text())
    for index in range(1, count):
        copy = root / f"run-{index:03d}"
        shutil.copytree(made.folder.uri, copy)
        (copy / "run.json").write_text(json.dumps(record | {"run_id": copy.name}))


def measure(root: Path, *arguments: str) -> float:
    command = [str(Path(sys.executable).parent / "milepost"), "status", *arguments, "--root", str(root)]
    seconds = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        seconds.append(time.perf_counter() - begun)
    return min(seconds)


def main(count: int, steps: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        fill(Path(folder), count, steps)
        print(f"milepost status, {count} runs of {steps} steps: {measure(Path(folder)):.2f} s")
        print(f"milepost status RUN, {steps} steps: {measure(Path(folder), 'made'):.2f} s")


if __name__ == "__main__":
    main(*(int(argument) for argument in [*sys.argv[1:], "100", "10"][:2]))
