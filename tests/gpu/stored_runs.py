"""Runs of `milepost train`: the command, and what a stored run shows of itself."""

import itertools
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np

from milepost.flows.results import finished
from milepost.storage import files, manifest, runs
from milepost.storage.runs import RunFolder
from milepost.storage.tables import TableRef, read_table
from milepost.storage.verify import verify

LOG_BYTES = 60_000
STAGES = ("generate", "score", "filter", "optimize", "sync")
SGLANG = {"attention_backend": "triton", "sampling_backend": "pytorch", "mem_fraction_static": 0.4}
_MILEPOST = [sys.executable, "-c", "from milepost.flows.cli import main; main()"]


def train_command(run: str, root: Path, steps: int, settings: list[str], *, recipe: str = "") -> list[str]:
    """Train, or go on: the same words do both."""
    words = ["train", "--run", run, "--root", str(root), "--steps", str(steps)]
    words += ["--config", recipe] if recipe else []
    return [*_MILEPOST, *words, *(word for setting in settings for word in ("--set", setting))]


def sglang_python() -> str:
    """Where SGLang has an environment of its own beside this one, as on a CPU; else empty."""
    python = Path(__file__).parents[2] / ".venv-sglang" / "bin" / "python"
    return os.environ.get("MILEPOST_SGLANG_PYTHON") or (str(python) if python.exists() else "")


def summary(folder: RunFolder) -> dict[str, Any]:
    """Of a run that may have ended early; nothing of one that never began."""
    if not files.exists(folder.record):
        return {"steps": 0, "faults": ["the run never began"]}
    steps = finished(folder)
    return {
        "steps": len(steps),
        "planned": runs.load(folder).steps,
        "reward": [step.metrics.get("rollout/reward") for step in steps],
        "response_tokens": [step.metrics.get("rollout/response_len/mean") for step in steps],
        "kept": [step.metrics.get("rollout/kept_ratio") for step in steps],
        "accounting": [step.accounting for step in steps],
        "stages": stage_shares(folder),
        "faults": [f"{fault.file}: {fault.problem}" for fault in verify(folder).faults],
    }


def stage_shares(folder: RunFolder) -> dict[str, dict[str, float]]:
    """Median seconds of each stage and its share of the median step, from manifest to manifest.

    Shards run side by side, so stages may overlap; `other` is what is left: memory that changes hands, evaluation,
    and the flow itself. The first steps compile and are left out where there are more.
    """
    steps = finished(folder)[2:] or finished(folder)
    published = [os.stat(folder.manifest(step.step)).st_mtime for step in steps]
    if len(steps) < 2:
        return {}
    whole = statistics.median(after - before for before, after in itertools.pairwise(published))
    seconds = {name: statistics.median(step.metrics.get(f"time/{name}", 0.0) for step in steps) for name in STAGES}
    seconds |= {"other": max(0.0, whole - sum(seconds.values())), "step": whole}
    return {name: {"seconds": taken, "share": taken / whole} for name, taken in seconds.items()}


def last_words(folder: RunFolder) -> bytes:
    """The stacks that were kept of late stages, and the end of every process's log."""
    found = []
    for kind in ("stacks", "logs"):
        for name in files.names(files.join(folder.uri, kind)):
            text = files.read(files.join(folder.uri, kind, name))
            found.append(f"=== {kind}/{name}\n".encode() + text[-LOG_BYTES:])
    return b"\n".join(found)


def logprob_differences(folder: RunFolder) -> list[dict[str, float]]:
    """Of the engine's and the trainer's log-probabilities of the same tokens, in every step: each is after a push."""
    found = []
    for step in manifest.finished_steps(folder):
        entry = next(item for item in manifest.load(folder, step).commits if item["slot"] == "optimize-r0")
        tables = [read_table(TableRef(**ref)) for ref in entry["tables"].values()]
        if not tables:  # nothing was kept to train on
            continue
        engine, trainer = (
            np.concatenate([np.array(row) for batch in tables for row in batch[name].to_pylist()])
            for name in ("rollout_logprobs", "old_logprobs")
        )
        apart = np.abs(engine - trainer)
        found.append({"mean": float(apart.mean()), "max": float(apart.max()), "tokens": float(len(apart))})
    return found
