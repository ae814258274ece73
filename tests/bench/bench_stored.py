"""What it costs to ask a stored run: `python tests/bench/bench_stored.py [STEPS]` (100; 500 take minutes and 4 GB).

Each step has 256 samples of 500 tokens with random ids and log-probabilities, made by what stores real ones.
"""

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from made_run import MadeRun, add_step, begin_run

from milepost.engines.local_graders import LocalGraders
from milepost.flows.regrading import regrade_steps
from milepost.flows.sample_view import stored_sample
from milepost.flows.sql import query
from milepost.storage import manifest
from milepost.storage.ancestry import ancestry
from milepost.storage.parameters import RewardSection
from milepost.storage.tables import TableRef, encode, read_table
from milepost.storage.touches import touches

GROUPS, SAMPLES, TOKENS = 32, 8, 500
REWARDS = "select step, avg(reward) from rollouts group by step order by step"
R = TypeVar("R")


def seconds(work: Callable[[], R]) -> tuple[float, R]:
    started = time.perf_counter()
    found = work()
    return time.perf_counter() - started, found


def make(root: str, steps: int) -> MadeRun:
    made = begin_run(root, prompts=1000, groups=GROUPS, samples=SAMPLES, tokens=TOKENS, shards=4)
    for step in range(steps):
        add_step(made, step)
    return made


def sizes(made: MadeRun, step: int) -> dict[str, float]:
    """Bytes a token of the tables that a step stored, by stage."""
    found: dict[str, float] = {}
    for entry in manifest.load(made.folder, step).commits:
        stage = entry["slot"].split("-")[0]
        for ref in entry["tables"].values():
            found[stage] = found.get(stage, 0.0) + Path(ref["uri"]).stat().st_size / (GROUPS * SAMPLES * TOKENS)
    return found


def write_speed(made: MadeRun) -> float:
    """MB of table data a second that one core encodes."""
    entry = next(item for item in manifest.load(made.folder, 0).commits if item["slot"].startswith("filter"))
    table = read_table(TableRef(**entry["tables"]["rollouts"]))
    taken = [seconds(lambda: encode(table))[0] for _ in range(10)]
    return float(table.nbytes / 1e6 / statistics.median(taken))


def main(steps: int) -> None:
    with tempfile.TemporaryDirectory() as root:
        made = make(root, steps)
        folder = made.folder
        sample = f"{steps // 2:06d}-0-0003-001"
        prompt = ancestry(folder, 1).prompts[0].prompt_id
        rows = [
            ("mean reward by step, SQL", seconds(lambda: query([folder], REWARDS))[0]),
            ("one sample by its id", seconds(lambda: stored_sample(folder, sample))[0]),
            ("lineage of the newest checkpoint", seconds(lambda: ancestry(folder, steps))[0]),
            ("everything a prompt touched", seconds(lambda: touches(root, "prompt", prompt))[0]),
        ]
        with LocalGraders() as graders:
            some = min(steps, 10)
            work = regrade_steps(folder, range(some), RewardSection(name="exact"), graders)
            taken, _ = seconds(lambda: asyncio.run(work))
        print(f"{steps} steps of {GROUPS * SAMPLES} samples of {TOKENS} tokens\n\n| what | result |\n|---|---|")
        for what, value in rows:
            print(f"| {what} | {value:.2f} s |")
        print(f"| regrade by `exact` | {some * GROUPS * SAMPLES / taken:,.0f} samples/s |")
        stored = ", ".join(f"{name} {value:.1f}" for name, value in sizes(made, 0).items())
        print(f"| bytes a token, by stage | {stored} |")
        print(f"| tables written by one core | {write_speed(made):.0f} MB/s |")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100)
