"""Seconds to verify a run of 1,000 steps of 64 samples: `python tests/bench/bench_verify.py [steps]`."""

import os
import sys
import tempfile
import time

from made_run import make_run

from milepost.storage.verify import verify


def main(steps: int = 1000) -> None:
    with tempfile.TemporaryDirectory() as root:
        made = make_run(root, steps, prompts=500, groups=8, samples=8, tokens=64, shards=4)
        started = time.perf_counter()
        found = verify(made.folder)
        seconds = time.perf_counter() - started
        assert not found.faults, found.faults[:3]
        print(
            f"verify {found.steps} steps, {found.samples} samples, {found.tables} tables on {os.cpu_count()} cores: "
            f"{seconds:.1f} s"
        )


if __name__ == "__main__":
    main(*(int(word) for word in sys.argv[1:2]))
