"""GRPO of SmolLM2-135M-Instruct through the whole DAG on one GPU, and the same with processes killed on the way.

python tests/gpu/learn.py [--steps 60] [--kills]     writes learn.json, or kills.json, into --out or $OUT
With --tiny the model is random and everything runs on a CPU.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from milepost.flows.data import make_reasoning_gym
from milepost.flows.report import evaluations
from milepost.storage import files, manifest, runs
from milepost.storage.runs import RunFolder
from milepost.storage.verify import verify

MILEPOST = [sys.executable, "-c", "from milepost.flows.cli import main; main()"]
TINY = [
    "model.context_length=512",
    "data.rollout_batch_size=4",
    "data.n_samples_per_prompt=2",
    "rollout.max_new_tokens=8",
    "perf.dtype=float32",
    "perf.train_threads=1",
    "engines.rollout_threads=1",
    'engines.sglang={"max_total_tokens": 8192}',
    "perf.max_tokens_per_micro_batch=1024",
    "engines.max_running_requests=8",
    "eval.every_steps=2",
    "filter.group=none",
]


def prompts(folder: Path, *, size: int, held_out: int) -> list[str]:
    """Settings with the prompts and the held-out prompts, which share no seed."""
    for name, count, seed in (("prompts", size, 0), ("held_out", held_out, 1)):
        make_reasoning_gym("chain_sum", count, seed, str(folder / f"{name}.parquet"))
    return [f"data.path={folder}/prompts.parquet", f"eval.path={folder}/held_out.parquet"]


def command(run: str, root: Path, steps: int, settings: list[str]) -> list[str]:
    words = ["train", "--config", "smollm2-gpu", "--run", run, "--root", str(root), "--steps", str(steps)]
    return [*MILEPOST, *words, *(word for setting in settings for word in ("--set", setting))]


def kill_after(commit: str, victim: str, killed: list[str]) -> None:
    """SIGKILL the process whose command line holds `victim`, as soon as the file `commit` is there."""
    while not files.exists(commit):
        time.sleep(0.05)
    for process in psutil.Process().children(recursive=True):
        if victim in " ".join(process.cmdline()):
            process.kill()
            killed.append(victim)
            return


def train(
    run: str, root: Path, steps: int, settings: list[str], victims: dict[str, str]
) -> tuple[RunFolder, list[str]]:
    """A run, and which processes of it were killed: `victims` by the commit after which they are, as STEP/SLOT."""
    folder = runs.run_folder(str(root), run)
    killed: list[str] = []
    for place, victim in victims.items():
        step, slot = place.split("/")
        commit = files.join(folder.step(int(step)), "journal", f"{slot}.json")
        threading.Thread(target=kill_after, args=(commit, victim, killed), daemon=True).start()
    subprocess.run(command(run, root, steps, settings), check=True)
    return folder, killed


def summary(folder: RunFolder) -> dict[str, Any]:
    steps = [manifest.load(folder, step) for step in manifest.finished_steps(folder)]
    return {
        "evaluations": [asdict(found) for found in evaluations(folder)],
        "rewards": [step.metrics.get("rollout/reward") for step in steps],
        "accounting": [step.accounting for step in steps],
        "metrics": [step.metrics for step in steps],
        "faults": [str(fault) for fault in verify(folder).faults],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--kills", action="store_true", help="kill the server in one step and the trainer in another")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--set", action="append", default=[], dest="settings")
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        root, size = Path(name), 32 if arguments.tiny else 1000
        settings = ["tracking.enabled=false", *prompts(root, size=size, held_out=size // 2)]
        settings += [*(TINY if arguments.tiny else []), *arguments.settings]
        started = time.monotonic()
        calm, _ = train("calm", root, arguments.steps, settings, {})
        result: dict[str, Any] = {"seconds": time.monotonic() - started, "calm": summary(calm)}
        if arguments.kills:
            victims = {"1/generate-r0-s000": "sglang.launch_server", "3/optimize-r0": "ray::RankActor"}
            folder, killed = train("killed", root, arguments.steps, settings, victims)
            result |= {"killed": summary(folder), "victims": killed}
            result["same_accounting"] = result["calm"]["accounting"] == result["killed"]["accounting"]
    name = "kills.json" if arguments.kills else "learn.json"
    Path(arguments.out, name).write_text(json.dumps(result, indent=1))
    for run in [result[key] for key in ("calm", "killed") if key in result]:
        for found in run["evaluations"]:
            print(f"step {found['step']}: {found['mean']:.3f} ({found['low']:.3f} to {found['high']:.3f})")
        print("faults:", run["faults"])
    if arguments.kills:
        print("killed:", result["victims"], "same accounting:", result["same_accounting"])


if __name__ == "__main__":
    main()
