"""`milepost regrade` of a whole run against what generating its samples took: bench_regrade.py [ROOT RUN].

Without a run the demo is made first, in minutes. Seconds are of the whole command, imports and all.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from milepost.flows.demo import run_demo
from milepost.flows.results import curve, finished
from milepost.storage import runs

TIMES = 3


def regrade_seconds(root: str, run: str) -> float:
    command = [str(Path(sys.executable).parent / "milepost"), "regrade", run, "--root", root]
    started = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - started


def compare(root: str, run: str) -> None:
    steps = finished(runs.run_folder(root, run))
    samples = sum(curve(steps, "rollout/samples"))
    generated = sum(curve(steps, "time/generate"))
    regraded = statistics.median(regrade_seconds(root, run) for _ in range(TIMES))
    print("| steps | samples | generated | regraded | ratio |\n|---|---|---|---|---|")
    print(f"| {len(steps)} | {samples:,.0f} | {generated:.1f} s | {regraded:.2f} s | {generated / regraded:.0f} |")


def main(arguments: list[str]) -> None:
    if arguments:
        compare(*arguments)
        return
    with tempfile.TemporaryDirectory() as root:
        compare(root, run_demo(root, seed=0).run)


if __name__ == "__main__":
    main(sys.argv[1:])
