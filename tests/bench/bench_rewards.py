"""Samples per second through the graders of one process: `python tests/bench/bench_rewards.py`."""

import time

from milepost.tasks.rewards import grade

CASES = {
    "exact": ("5", "5"),
    "math, a numeral": (r"so \boxed{1,024}", "1024"),
    "math, an expression": (r"\boxed{(x+1)^2}", "x^2+2x+1"),
}
SAMPLES = 300


def main() -> None:
    for name, (response, label) in CASES.items():
        reward = name.partition(",")[0]
        grade(reward, response, label)
        started = time.perf_counter()
        scores = [grade(reward, response, label).score for _ in range(SAMPLES)]
        assert scores == [1.0] * SAMPLES
        print(f"{name:20} {SAMPLES / (time.perf_counter() - started):8.0f} samples/s")


if __name__ == "__main__":
    main()
