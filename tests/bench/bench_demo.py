"""The demo on several seeds: held-out greedy accuracy after warm-up and after GRPO.

python tests/bench/bench_demo.py [SEEDS]
"""

import sys
import tempfile
import time

from milepost.flows.demo import run_demo

WANTED_GAIN = 0.15


def main(seeds: int) -> None:
    print("| seed | after warm-up | after GRPO | gain | minutes |\n|---|---|---|---|---|")
    gains = []
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as root:
            begun = time.monotonic()
            result = run_demo(root, seed=seed)
            minutes = (time.monotonic() - begun) / 60
        gains.append(result.after.mean - result.before.mean)
        cells = (f"{item.mean:.3f} ({item.low:.3f} to {item.high:.3f})" for item in (result.before, result.after))
        print(f"| {seed} | {' | '.join(cells)} | {gains[-1]:+.3f} | {minutes:.1f} |", flush=True)
    verdict = "every seed gains" if min(gains) >= WANTED_GAIN else "NOT every seed gains"
    print(f"{verdict} at least {WANTED_GAIN}")
    sys.exit(min(gains) < WANTED_GAIN)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
