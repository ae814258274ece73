"""The fifth node: advantages, and one optimizer step for each batch of the kept samples."""

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa
from prefect import task
from prefect.cache_policies import NO_CACHE

from milepost.engines.protocols import TrainEngine, UpdateParams, UpdateResult
from milepost.storage.batch_plan import BatchPlan
from milepost.storage.journal import Commit, Slot, StepStore
from milepost.storage.schema import ROLLOUTS
from milepost.storage.tables import TableRef, concat, read_table, with_columns
from milepost.storage.training import AlgorithmSection
from milepost.tasks.advantages import advantage_columns

_LOSS_PARAMS = {"clip_low", "clip_high", "aggregation"}


class TooManySkips(RuntimeError):
    """More optimizer steps in a row than allowed had a loss or gradient that was not finite."""


class TooFewGroups(RuntimeError):
    """Filtering left fewer groups than a step needs, and the policy is to fail."""


@dataclass(frozen=True)
class Optimized:
    """What the optimizer did with a step: `results` has one entry a batch and is empty when the step was skipped."""

    batches: list[TableRef]
    results: list[UpdateResult]


def first_groups(table: pa.Table, count: int) -> pa.Table:
    """The kept samples of the first `count` groups that have any; a surplus of groups is left aside."""
    kept = table.filter(table["kept"])
    chosen = list(dict.fromkeys(kept["group_id"].to_pylist()))[:count]
    return kept.filter(pa.compute.is_in(kept["group_id"], pa.array(chosen, pa.string())))


def batches(table: pa.Table, count: int) -> list[pa.Table]:
    """The rows in `count` consecutive slices, as equal as they can be: exactly equal for a full step."""
    bounds = [round(index * table.num_rows / count) for index in range(count + 1)]
    slices = [table.slice(start, end - start) for start, end in itertools.pairwise(bounds)]
    return [part for part in slices if part.num_rows]


def skipped_in_a_row(applied: Sequence[bool]) -> int:
    """How many of the newest optimizer steps were skipped, from the oldest to the newest."""
    return len(list(itertools.takewhile(lambda done: not done, reversed(applied))))


def history(store: StepStore) -> list[bool]:
    """Whether each optimizer step of the run so far was applied, this step's own commit included."""
    applied: list[bool] = []
    for step in range(store.step + 1):
        commit = store.at(step).stored(Slot("optimize"))
        applied += [result["applied"] for result in commit.record["results"]] if commit else []
    return applied


def require_progress(results: list[UpdateResult], limit: int, store: StepStore) -> None:
    """TooManySkips when more than `limit` optimizer steps in a row, up to the last of `results`, were skipped."""
    if not results or results[-1].applied:
        return
    skipped = skipped_in_a_row(history(store))
    if skipped > limit:
        raise TooManySkips(
            f"{skipped} optimizer steps in a row had a loss or gradient that is not finite, "
            f"algorithm.max_skipped_steps allows {limit}: lower optimizer.lr, or look at the batches in {store.uri}"
        )


def update_params(algorithm: AlgorithmSection) -> UpdateParams:
    return UpdateParams(algorithm.loss, algorithm.model_dump(mode="json", include=_LOSS_PARAMS))


def with_advantages(table: pa.Table, algorithm: AlgorithmSection) -> pa.Table:
    columns = advantage_columns(table, algorithm.advantage, **_advantage_params(algorithm))
    return with_columns(table, {"advantages": list(columns)})


def _advantage_params(algorithm: AlgorithmSection) -> dict[str, Any]:
    return {"normalize_std": algorithm.normalize_std} if algorithm.advantage == "grpo" else {}


def require_logprobs(table: pa.Table) -> None:
    """ValueError when samples that were made elsewhere came without the log-probabilities they were sampled with."""
    lacking = table["rollout_logprobs"].null_count
    if lacking:
        raise ValueError(
            f"{lacking} of {table.num_rows} samples have no rollout_logprobs: set algorithm.old_logprobs=recompute"
        )


async def _prepare(table: pa.Table, algorithm: AlgorithmSection, *, engine: TrainEngine, store: StepStore) -> pa.Table:
    """Advantages and old log-probabilities for every row, before any of them changes the weights."""
    table = with_advantages(table, algorithm)
    if algorithm.old_logprobs == "rollout":
        require_logprobs(table)
        return with_columns(table, {"old_logprobs": table["rollout_logprobs"].to_pylist()})
    ref = store.write("advantages", table, ROLLOUTS)
    scored = await asyncio.to_thread(engine.logprobs, ref, "policy", f"{store.uri}/logprobs")
    return read_table(scored)


async def _apply(
    parts: list[pa.Table], update: UpdateParams, *, key: str, engine: TrainEngine, store: StepStore
) -> Optimized:
    refs = [store.write(f"batch-{index:03d}", part, ROLLOUTS) for index, part in enumerate(parts)]
    results = [
        await asyncio.to_thread(engine.step, ref, update, f"{key}-{index:03d}") for index, ref in enumerate(refs)
    ]
    return Optimized(refs, results)


def trained_groups(refs: list[TableRef]) -> set[str]:
    """The groups that reached an optimizer batch."""
    return {group for ref in refs for group in read_table(ref)["group_id"].to_pylist()}


def batch_refs(commit: Commit) -> list[TableRef]:
    """The batches of a committed optimize stage, in the order they were applied."""
    return [commit.tables[name] for name in sorted(commit.tables)]


def replay(commit: Commit, engine: TrainEngine) -> int:
    """Apply a committed stage's batches under their keys; an engine that has them answers and does nothing."""
    update = UpdateParams(**commit.record["update"])
    refs = batch_refs(commit)
    for ref, result in zip(refs, commit.record["results"], strict=True):
        engine.step(ref, update, result["key"])
    return len(refs)


@task(task_run_name="optimize", cache_policy=NO_CACHE)
async def optimize_policy(
    filtered: list[TableRef],
    algorithm: AlgorithmSection,
    plan: BatchPlan,
    *,
    weight_version: str,
    engine: TrainEngine,
    store: StepStore,
) -> Optimized:
    """`plan.num_steps_per_rollout` optimizer steps over the kept samples, in the order of the shards."""
    started = time.monotonic()
    slot = Slot("optimize")
    config = (
        algorithm.model_dump(mode="json", exclude={"max_skipped_steps"})
        | asdict(plan)
        | {"weight_version": weight_version}
    )
    key = store.key(slot, filtered, config)
    commit = store.committed(slot, key)
    if commit is None:
        update = update_params(algorithm)
        table = first_groups(concat([read_table(ref) for ref in filtered], ROLLOUTS), plan.rollout_batch_size)
        done = Optimized([], [])
        if table.num_rows:
            table = await _prepare(table, algorithm, engine=engine, store=store)
            parts = batches(table, plan.num_steps_per_rollout)
            done = await _apply(parts, update, key=key, engine=engine, store=store)
        tables = {f"batch-{index:03d}": ref for index, ref in enumerate(done.batches)}
        record = {"update": asdict(update), "results": [asdict(result) for result in done.results]}
        commit = store.commit(slot, key, tables, record=record, started=started)
    else:
        # The engine may be a new one: it applies what it has not, and answers what it has.
        await asyncio.to_thread(replay, commit, engine)
    results = [UpdateResult(**result) for result in commit.record["results"]]
    require_progress(results, algorithm.max_skipped_steps, store)
    return Optimized(batch_refs(commit), results)
