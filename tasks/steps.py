"""What a step was, computed from its tables: metrics, prompt accounting, and the manifest that closes it."""

from collections import Counter
from dataclasses import dataclass

import numpy as np

from milepost.engines.protocols import UpdateResult, WeightVersion
from milepost.storage import manifest
from milepost.storage.accounting import check_accounting
from milepost.storage.journal import StepStore
from milepost.storage.manifest import StepManifest
from milepost.storage.prompt_order import Cursor
from milepost.storage.runs import RunFolder
from milepost.storage.tables import read_table
from milepost.tasks.critic import Critique, named_metrics
from milepost.tasks.generate import ENGINE_WORK, REUSED_TOKENS

# How fast the trainer was, under Miles' names; what it learnt is under train/.
SPEED = {
    "tokens_per_second": "perf/actor_train_tok_per_s",
    "tflops": "perf/actor_train_tflops",
    "mfu": "perf/actor_train_mfu",
    "micro_batches": "perf/micro_batches",
    "packing_efficiency": "perf/packing_efficiency",
    "imbalance": "perf/imbalance",
    "critic-tokens_per_second": "perf/critic_train_tok_per_s",
    "critic-tflops": "perf/critic_train_tflops",
    "critic-mfu": "perf/critic_train_mfu",
}


@dataclass(frozen=True)
class StepOutcome:
    """Where a step began and ended, and the attempt it was made under."""

    version_in: WeightVersion
    version_out: WeightVersion
    cursor: Cursor
    checkpoint: str
    attempt: int = 1
    parameters_digest: str = ""


def update_metrics(results: list[UpdateResult], critic: Critique | None = None) -> dict[str, float]:
    """Means over the optimizer steps of a step, under the names they are shown by, and how many were skipped.

    A batch without a token to train is none that was skipped: nothing went wrong with it.
    """
    found: dict[str, float] = {}
    if critic:
        found = _means(named_metrics(critic.results)) | _counts(critic.results, "critic-") | critic.metrics
    return found | _means([result.metrics for result in results]) | _counts(results)


def _means(found: list[dict[str, float]]) -> dict[str, float]:
    names = sorted({name for metrics in found for name in metrics})
    values = {name: [metrics[name] for metrics in found if name in metrics] for name in names}
    return {SPEED.get(name, f"train/{name}"): float(np.mean(each)) for name, each in values.items()}


def _counts(results: list[UpdateResult], of: str = "") -> dict[str, float]:
    return {
        f"train/{of}optimizer_steps": float(sum(result.applied for result in results)),
        f"train/{of}skipped_steps": float(sum(not (result.applied or result.is_empty) for result in results)),
        f"train/{of}empty_batches": float(sum(result.is_empty for result in results)),
    }


def stage_seconds(store: StepStore) -> dict[str, float]:
    """Longest time of each stage: shards run side by side."""
    seconds: dict[str, float] = {}
    for commit in store.commits():
        stage = commit.slot.split("-")[0]
        seconds[f"time/{stage}"] = max(seconds.get(f"time/{stage}", 0.0), commit.seconds)
    return seconds


def reused_tokens(store: StepStore) -> int:
    """Tokens of this step's samples that the step before has generated."""
    return sum(commit.record.get(REUSED_TOKENS, 0) for commit in store.commits())


def engine_work(store: StepStore) -> dict[str, float]:
    """The sums of what the engines say of their work in this step; see EngineWork."""
    sums: Counter[str] = Counter()
    for commit in store.commits():
        sums.update(commit.record.get(ENGINE_WORK, {}))
    return dict(sums)


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
