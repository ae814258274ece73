"""GRPO of SmolLM2-135M-Instruct on sums of two numbers of two digits, through the whole DAG on one GPU.

python tests/gpu/learn.py [--steps 45] [--limit-seconds 540]     writes learn.json into --out or $OUT

Held-out accuracy is greedy, on prompts of which none is trained on. At the time limit training ends in good order, and
the newest evaluation counts. With --tiny the same model takes a few small steps on a CPU.
"""

import argparse
import json
import math
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from commands import GRACE_SECONDS, leaving_nothing, run
from result_table import table
from stored_runs import SGLANG, last_words, logprob_differences, summary, train_command

from milepost.flows.gym_data import make_reasoning_gym
from milepost.flows.results import evaluations
from milepost.storage import files, runs
from milepost.storage.journal import StepStore
from milepost.storage.runs import RunFolder
from milepost.storage.tables import read_table
from milepost.tasks.intervals import Z_95, wilson

SUMS: dict[str, Any] = {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}
SHOTS = 2
RISE = ("rise", "low", "high", "mcnemar_p", "significant")
REPORT_SECONDS = 20.0  # to check and sum up the run after its end
TINY = [
    "data.rollout_batch_size=4",
    "data.n_samples_per_prompt=4",
    "algorithm.num_steps_per_rollout=1",
    "engines.rollout=embedded",
    "engines.max_running_requests=16",
    "perf.dtype=float32",
    "perf.max_tokens_per_micro_batch=1024",
    "sync.transport=disk",
    "eval.every_steps=1",
]


def prompts(folder: Path, *, size: int, held_out: int) -> list[str]:
    """Settings with the prompts to train on and those held out."""
    train, rest = (str(folder / f"{name}.parquet") for name in ("prompts", "held_out"))
    make_reasoning_gym("chain_sum", size, 0, train, shots=SHOTS, text=True, **SUMS)
    make_reasoning_gym("chain_sum", held_out, size, rest, shots=SHOTS, text=True, without=train, **SUMS)
    return [f"data.path={train}", f"eval.path={rest}"]


def answers(folder: RunFolder, step: int) -> list[bool]:
    """Whether each held-out prompt was answered right by the weights after `step` steps, in the order of prompts."""
    store = StepStore(files.join(folder.uri, "evals", f"{step:06d}"), folder.run_id, step)
    table = read_table(store.commits()[0].tables["rollouts"])
    pairs = zip(table["group_id"].to_pylist(), table["reward"].to_pylist(), strict=True)
    return [reward == 1.0 for _, reward in sorted(pairs)]


def mcnemar(before: list[bool], after: list[bool]) -> float:
    """The exact two-sided p-value that as many answers became right as became wrong (McNemar 1947)."""
    changed = [new for old, new in zip(before, after, strict=True) if old != new]
    fewer = min(sum(changed), len(changed) - sum(changed))
    tail = sum(math.comb(len(changed), count) for count in range(fewer + 1))
    return float(min(1.0, 2 * tail / 2 ** len(changed)))


def rise(before: list[bool], after: list[bool]) -> dict[str, Any]:
    """How much accuracy rose on the same prompts, with its 95 % interval, and whether that is more than chance."""
    gained = sum(new and not old for old, new in zip(before, after, strict=True))
    lost = sum(old and not new for old, new in zip(before, after, strict=True))
    count, change = len(before), (gained - lost) / len(before)
    half = Z_95 * math.sqrt(max(0.0, (gained + lost) / count - change**2) / count)
    p_value = mcnemar(before, after)
    return {
        "became_right": gained,
        "became_wrong": lost,
        "rise": change,
        "low": change - half,
        "high": change + half,
        "mcnemar_p": p_value,
        "significant": change > 0 and p_value < 0.05,
    }


def accuracies(folder: RunFolder) -> dict[str, Any]:
    """Accuracy with its 95 % Wilson interval at every evaluation, and the rise from the first to the last."""
    found = {evaluation.step: answers(folder, evaluation.step) for evaluation in evaluations(folder)}
    rows = [{"step": step, **vars(wilson(sum(right) / len(right), len(right)))} for step, right in found.items()]
    steps = list(found)
    return {"accuracy": rows, "first_to_last": rise(found[steps[0]], found[steps[-1]]) if steps[1:] else None}


def tables(result: dict[str, Any]) -> str:
    """Accuracies, the shares of a step, and the whole in one line."""
    accuracy = [[row["step"], row["mean"], row["low"], row["high"]] for row in result["accuracy"]]
    stages = [[name, stage["seconds"], stage["share"]] for name, stage in result.get("stages", {}).items()]
    rewards, found = result.get("reward") or [None], result["first_to_last"] or {}
    whole = [result["steps"], result["seconds"], rewards[0], rewards[-1], *(found.get(name) for name in RISE)]
    return "\n\n".join(
        [
            table(["steps", "held-out accuracy", "from", "to (95 %)"], accuracy),
            table(["stage", "seconds of a step", "share"], stages),
            table(["steps", "seconds", "first reward", "last", *RISE, "faults"], [[*whole, len(result["faults"])]]),
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=45)
    parser.add_argument("--held-out", type=int, default=0, help="prompts; by default 1000, or 16 with --tiny")
    parser.add_argument("--limit-seconds", type=float, default=540.0, help="for everything")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--set", action="append", default=[], dest="settings", help="section.field=value")
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    arguments = parser.parse_args()
    started = time.monotonic()
    with leaving_nothing(), tempfile.TemporaryDirectory() as name:
        folder = runs.run_folder(name, "learn")
        made = prompts(Path(name), size=1000, held_out=arguments.held_out or (16 if arguments.tiny else 1000))
        own = TINY if arguments.tiny else [f"engines.sglang={json.dumps(SGLANG)}", "engines.stage_timeout_seconds=120"]
        settings = ["tracking.enabled=false", *made, *own, *arguments.settings]
        words = train_command("learn", Path(name), arguments.steps, settings, recipe="smollm2-gpu")
        spent = time.monotonic() - started
        ended = run(words, limit_seconds=arguments.limit_seconds - spent - GRACE_SECONDS - REPORT_SECONDS)
        result: dict[str, Any] = {
            "arguments": vars(arguments),
            "seconds": ended.seconds,
            "in_time": ended.in_time,
            "exit_code": ended.exit_code,
        }
        result |= summary(folder) | accuracies(folder) | {"logprob_differences": logprob_differences(folder)}
        Path(arguments.out, "learn.json").write_text(json.dumps(result, indent=1))
        if result["steps"] < arguments.steps or ended.exit_code:
            Path(arguments.out, "learn_why.txt").write_bytes(last_words(folder))
    print(tables(result), *result["faults"], sep="\n", flush=True)
    return int((ended.in_time and ended.exit_code != 0) or bool(result["faults"]))


if __name__ == "__main__":
    sys.exit(main())
