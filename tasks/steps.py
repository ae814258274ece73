"""What a step was, computed from its tables: metrics, prompt accounting, and the manifest that closes it."""

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from milepost.engines.protocols import UpdateResult, WeightVersion
from milepost.storage import manifest
from milepost.storage.accounting import check_accounting
from milepost.storage.journal import StepStore
from milepost.storage.manifest import StepManifest
from milepost.storage.prompt_order import Cursor
from milepost.storage.runs import RunFolder
from milepost.storage.tables import read_table

_READ = ["group_id", "reward", "kept", "drop_reason", "status", "response_token_ids"]


@dataclass(frozen=True)
class StepOutcome:
    """Where a step began and ended, and the attempt it was made under."""

    version_in: WeightVersion
    version_out: WeightVersion
    cursor: Cursor
    checkpoint: str
    attempt: int = 1
    parameters_digest: str = ""


def rollout_metrics(table: pa.Table) -> dict[str, float]:
    """Means over the samples of a step. Rewards that are null leave the reward's statistics."""
    table = table.select(_READ)
    lengths = np.asarray(pa.compute.list_value_length(table["response_token_ids"]), dtype=float)
    rewards = np.asarray(table["reward"].drop_null(), dtype=float)
    status = Counter(table["status"].to_pylist())
    metrics = {
        "rollout/samples": float(table.num_rows),
        "rollout/tokens": float(lengths.sum()),
        "rollout/response_len/mean": float(lengths.mean()),
        "rollout/response_len/max": float(lengths.max()),
        "rollout/truncated_ratio": status["truncated"] / table.num_rows,
        "rollout/unscorable": float(table["reward"].null_count),
        "rollout/kept_ratio": float(np.mean(table["kept"].to_pylist())),
    }
    if len(rewards):
        metrics |= {"rollout/reward": float(rewards.mean()), "rollout/reward/std": float(rewards.std())}
    return metrics


def update_metrics(results: list[UpdateResult]) -> dict[str, float]:
    """Means over the optimizer steps of a step, and how many of them were skipped."""
    names = sorted({name for result in results for name in result.metrics})
    means = {
        f"train/{name}": float(np.mean([result.metrics[name] for result in results if name in result.metrics]))
        for name in names
    }
    return means | {
        "train/optimizer_steps": float(sum(result.applied for result in results)),
        "train/skipped_steps": float(sum(not result.applied for result in results)),
    }


def stage_seconds(store: StepStore) -> dict[str, float]:
    """Longest time of each stage: shards run side by side."""
    seconds: dict[str, float] = {}
    for commit in store.commits():
        stage = commit.slot.split("-")[0]
        seconds[f"time/{stage}"] = max(seconds.get(f"time/{stage}", 0.0), commit.seconds)
    return seconds


def served_groups(store: StepStore) -> list[str]:
    """The groups of every round of a step, in the order in which they were served."""
    sampled = (commit.tables["prompts"] for commit in store.commits() if commit.slot.startswith("sample-"))
    return [group for ref in sampled for group in read_table(ref)["group_id"].to_pylist()]


def close_step(
    store: StepStore, folder: RunFolder, outcome: StepOutcome, *, counts: dict[str, int], metrics: dict[str, float]
) -> StepManifest:
    """Publish the manifest: after this the step is finished for ever. AccountingError unless every prompt has ended."""
    check_accounting(counts, store.step)
    closed = StepManifest(
        run_id=store.run_id,
        step=store.step,
        previous=manifest.manifest_digest(folder, store.step - 1),
        version_in=f"{outcome.version_in.step}-{outcome.version_in.digest}",
        version_out=f"{outcome.version_out.step}-{outcome.version_out.digest}",
        checkpoint=outcome.checkpoint,
        cursor=vars(outcome.cursor),
        commits=manifest.commit_entries(store.commits()),
        accounting=counts,
        metrics=metrics,
        fence=store.fence,
        attempt=outcome.attempt,
        parameters_digest=outcome.parameters_digest,
    )
    manifest.publish(folder, closed)
    return closed
