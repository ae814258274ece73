"""Runs on two GPUs, of Qwen3 0.6B with random weights: `python tests/gpu/two_gpus.py [--cases apart,split]`.

`apart`: trainer on one GPU, SGLang on the other, weights by `distributed` over NCCL; the server is killed once.
`split`: trainer and SGLang share both GPUs, each with a tensor parallelism of two; weights as folders.

Writes two_gpus.json into --out or $OUT. With --tiny a tiny model on a CPU, over gloo. --embedded takes the embedded
engine for SGLang, which is not split, and folders for `distributed`.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from commands import GRACE_SECONDS, leaving_nothing, run
from kill import Kill, facts, killer
from made_model import random_model
from result_table import table
from stored_runs import SGLANG, last_words, logprob_differences, sglang_python, train_command

from milepost.engines.sglang_flags import CPU_CORES
from milepost.storage import manifest, runs
from milepost.storage.runs import RunFolder

CASES: dict[str, list[str]] = {
    "apart": ["perf.colocate=false", "sync.transport=distributed"],
    "split": ["perf.colocate=true", "sync.transport=disk", "model.tensor_parallel=2"],
}
KILLED = ("apart",)  # cases whose rollout engine is killed in step 1
HEAD = ["case", "killed", "steps", "seconds", "last push, s", "GB/s", "mean log-prob difference", "largest", "faults"]
SETTINGS = [
    "data.apply_chat_template=false",
    "algorithm.num_steps_per_rollout=2",
    "rollout.shards=2",
    "reward.name=tests.rewards_for_tests:parity",
    "tracking.enabled=false",
]
REAL = [
    "data.rollout_batch_size=32",
    "data.n_samples_per_prompt=8",
    "model.context_length=512",
    "rollout.max_new_tokens=256",
    "optimizer.lr=1e-4",
    "perf.dtype=bfloat16",
    "perf.max_tokens_per_micro_batch=16384",
    "engines.max_running_requests=256",
    "engines.start_timeout_seconds=400",
]
TINY = [
    "data.rollout_batch_size=4",
    "data.n_samples_per_prompt=4",
    "model.context_length=64",
    "rollout.max_new_tokens=32",
    "optimizer.lr=1e-3",
    "perf.train_threads=1",
    "engines.rollout_threads=1",
]


def prepare(root: Path, *, tiny: bool) -> list[str]:
    """Settings with a random model and prompts of sums."""
    (root / "model").mkdir()
    model = random_model("tiny" if tiny else "0.6B", root / "model")
    rows = [{"prompt": f"{number}+1=", "label": str(number + 1)} for number in range(200)]
    (root / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [f"model.path={model}", f"data.path={root}/prompts.jsonl", *SETTINGS, *(TINY if tiny else REAL)]


def engine_settings(case: str, arguments: argparse.Namespace) -> list[str]:
    if arguments.embedded:
        return ["engines.rollout=embedded", *(["sync.transport=disk"] if case == "apart" else [])]
    found = ["engines.rollout=sglang", f"engines.gpus_per_engine={2 if case == 'split' else 1}"]
    if arguments.tiny:
        os.environ.setdefault(CPU_CORES, "0|1")  # of each rank of a server
        flags: dict[str, Any] = {"max_total_tokens": 2048}
        found.append(f"engines.sglang_python={sglang_python()}")
    else:
        flags = SGLANG | {"disable_cuda_graph": True}
    return [*found, f"engines.sglang={json.dumps(flags)}"]


def pushes(folder: RunFolder) -> list[dict[str, float]]:
    """What each step's push took, as the run measured it."""
    steps = [manifest.load(folder, step).metrics for step in manifest.finished_steps(folder)]
    return [{name: value for name, value in metrics.items() if name.startswith("sync/")} for metrics in steps]


def one_case(case: str, root: Path, settings: list[str], arguments: argparse.Namespace, limit: float) -> dict[str, Any]:
    folder, kill = runs.run_folder(str(root), case), Kill("engine")
    begun = killer(folder, kill) if case in KILLED else None
    own = [*settings, *CASES[case], *engine_settings(case, arguments), *arguments.settings]
    ended = run(train_command(case, root, arguments.steps, own), limit_seconds=limit, begun=begun)
    if ended.exit_code or not ended.in_time:
        Path(arguments.out, f"{case}_why.txt").write_bytes(last_words(folder))
    found = {"seconds": ended.seconds, "in_time": ended.in_time, "exit_code": ended.exit_code, "killed": kill.process}
    return found | facts(folder) | {"pushes": pushes(folder), "logprob_differences": logprob_differences(folder)}


def row(name: str, case: dict[str, Any]) -> list[Any]:
    push = (case["pushes"] or [{}])[-1]
    apart = (case["logprob_differences"] or [{}])[-1]
    figures = [push.get("sync/seconds"), push.get("sync/gigabytes_per_second"), apart.get("mean"), apart.get("max")]
    return [name, case["killed"] or "nothing", case["steps"], case["seconds"], *figures, len(case["faults"])]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--limit-seconds", type=float, default=540.0, help="for everything")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--embedded", action="store_true", help="with --tiny: the embedded engine")
    parser.add_argument("--set", action="append", default=[], dest="settings", help="section.field=value")
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    arguments = parser.parse_args()
    deadline, cases = time.monotonic() + arguments.limit_seconds, {}
    with leaving_nothing(), tempfile.TemporaryDirectory() as name:
        root = Path(name)
        settings = prepare(root, tiny=arguments.tiny)
        for case in arguments.cases.split(","):
            left = deadline - time.monotonic() - GRACE_SECONDS
            if left <= 0:
                print(f"no time is left for {case}: call again with --cases {case}", flush=True)
                break
            cases[case] = one_case(case, root, settings, arguments, left)
    result = {"arguments": vars(arguments), "cases": cases}
    Path(arguments.out, "two_gpus.json").write_text(json.dumps(result, indent=1))
    print(table(HEAD, [row(name, case) for name, case in cases.items()]), flush=True)
    done = [case["steps"] == arguments.steps and not case["faults"] for case in cases.values()]
    killed = [bool(case["killed"]) for name, case in cases.items() if name in KILLED]
    return int(not all([*done, *killed]) or len(cases) < len(arguments.cases.split(",")))


if __name__ == "__main__":
    sys.exit(main())
