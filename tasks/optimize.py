"""The fifth node: advantages, and one optimizer step for each batch of the kept samples."""

import asyncio
import itertools
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import pyarrow as pa
from prefect import task
from prefect.cache_policies import NO_CACHE

from milepost.engines.protocols import Role, TrainEngine, UpdateParams, UpdateResult
from milepost.storage.journal import Commit, Slot, StepStore
from milepost.storage.schema import ROLLOUTS
from milepost.storage.tables import TableRef, concat, read_table, with_columns
from milepost.storage.training import AlgorithmSection
from milepost.storage.weight_version import WeightVersion
from milepost.tasks.advantages import DISCOUNTED, NORMALISED, PER_TOKEN, advantage_columns
from milepost.tasks.mismatch import mismatch_metrics
from milepost.tasks.off_policy import with_importance_weights
from milepost.tasks.self_check import SelfCheck, require_plan
from milepost.tasks.update import Update

REFERENCE = "reference"  # in the record of a commit: the weights that became the reference before it

_MISMATCH = "mismatch"

_log = logging.getLogger(__name__)


class TooManySkips(RuntimeError):
    """More optimizer steps in a row than allowed had a loss or gradient that was not finite."""


class TooFewGroups(RuntimeError):
    """Filtering left fewer groups than a step needs, and the policy is to fail."""


@dataclass(frozen=True)
class Optimized:
    """What the optimizer did with a step: `results` has one entry a batch and is empty when the step was skipped.

    `mismatch` says how far trainer and engine were apart before it; nothing where only one of them was asked.
    """

    batches: list[TableRef]
    results: list[UpdateResult]
    mismatch: dict[str, float] = field(default_factory=dict)


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


def stored_results(commit: Commit) -> list[UpdateResult]:
    """What came of each batch of a committed optimize stage."""
    return [UpdateResult(**result) for result in commit.record["results"]]


def history(store: StepStore) -> list[bool]:
    """Whether each optimizer step of the run so far was applied, this step's own commit included; not empty ones."""
    applied: list[bool] = []
    for step in range(store.step + 1):
        commit = store.at(step).stored(Slot("optimize"))
        applied += [result.applied for result in stored_results(commit) if not result.is_empty] if commit else []
    return applied


def require_progress(results: list[UpdateResult], limit: int, store: StepStore) -> None:
    """TooManySkips when more than `limit` optimizer steps in a row, up to the last of `results`, were skipped."""
    if all(result.applied or result.is_empty for result in results):
        return
    skipped = skipped_in_a_row(history(store))
    if skipped > limit:
        raise TooManySkips(
            f"{skipped} optimizer steps in a row had a loss or gradient that is not finite, "
            f"algorithm.max_skipped_steps allows {limit}: lower optimizer.lr, or look at the batches in {store.uri}"
        )


def with_advantages(table: pa.Table, algorithm: AlgorithmSection) -> pa.Table:
    """The table of a whole step with its advantages: statistics over samples and tokens are those of the step."""
    columns = advantage_columns(
        table, algorithm.advantage, whiten=algorithm.whiten_advantages, **_advantage_params(algorithm)
    )
    return with_columns(table, {"advantages": list(columns)})


def _advantage_params(algorithm: AlgorithmSection) -> dict[str, Any]:
    params: dict[str, Any] = {}
    if algorithm.advantage in NORMALISED:
        params["normalize_std"] = algorithm.normalize_std
    if algorithm.advantage in PER_TOKEN:
        params |= {"kl_coef": algorithm.kl_reward_coef, "kl_estimator": algorithm.kl_estimator}
    if algorithm.advantage in DISCOUNTED:
        params["gamma"] = algorithm.gamma
    return params


def require_logprobs(table: pa.Table) -> None:
    """ValueError when samples that were made elsewhere came without the log-probabilities they were sampled with."""
    lacking = table["rollout_logprobs"].null_count
    if lacking:
        raise ValueError(
            f"{lacking} of {table.num_rows} samples have no rollout_logprobs: set algorithm.old_logprobs=recompute"
        )


async def _prepare(table: pa.Table, update: Update, *, engine: TrainEngine, store: StepStore) -> pa.Table:
    """Log-probabilities of every row before any of them changes the weights, and the advantages that need them."""
    if update.algorithm.old_logprobs == "rollout":
        require_logprobs(table)
        table = with_columns(table, {"old_logprobs": table["rollout_logprobs"].to_pylist()})
    else:
        table = await _scored(table, "policy", engine=engine, store=store)
    if update.compares:
        table = await _scored(table, "reference", engine=engine, store=store)
    return with_advantages(table, update.algorithm)


async def _scored(table: pa.Table, role: Role, *, engine: TrainEngine, store: StepStore) -> pa.Table:
    """The table with the log-probabilities of the policy, or of the reference."""
    ref = store.write(f"for-{role}", table, ROLLOUTS)
    return read_table(await asyncio.to_thread(engine.logprobs, ref, role, f"{store.uri}/logprobs-{role}"))


async def _renewed(update: Update, weight_version: str, *, engine: TrainEngine, store: StepStore) -> dict[str, str]:
    """Let the policy become the reference where that is due; for the record, of which weights."""
    if not update.renews_reference(store.step):
        return {}
    await asyncio.to_thread(engine.renew_reference, weight_version)
    return {REFERENCE: weight_version}


async def _apply(
    parts: list[pa.Table],
    update: UpdateParams,
    *,
    key: str,
    engine: TrainEngine,
    store: StepStore,
    check: SelfCheck | None,
) -> Optimized:
    refs = [store.write(f"batch-{index:03d}", part, ROLLOUTS) for index, part in enumerate(parts)]
    results: list[UpdateResult] = []
    for index, ref in enumerate(refs):
        is_first = not any(result.applied for result in results)
        results.append(await asyncio.to_thread(engine.step, ref, update, f"{key}-{index:03d}"))
        if check and is_first:
            check.first_update(results[-1], step=store.step)
        if results[-1].is_empty:
            _log.warning("no sample of batch %s has a token to train: it is left out", ref.uri)
    return Optimized(refs, results)


def trained_groups(refs: list[TableRef]) -> set[str]:
    """The groups that reached an optimizer batch."""
    return {group for ref in refs for group in read_table(ref)["group_id"].to_pylist()}


def batch_refs(commit: Commit) -> list[TableRef]:
    """The batches of a committed optimize stage, in the order they were applied."""
    return [commit.tables[name] for name in sorted(commit.tables)]


def replay(commit: Commit, engine: TrainEngine) -> int:
    """Apply a committed stage's batches under their keys; an engine that has them answers and does nothing."""
    if REFERENCE in commit.record:
        engine.renew_reference(commit.record[REFERENCE])
    update = UpdateParams(**commit.record["update"])
    refs = batch_refs(commit)
    for ref, result in zip(refs, commit.record["results"], strict=True):
        engine.step(ref, update, result["key"])
    return len(refs)


@task(task_run_name="optimize", cache_policy=NO_CACHE)
async def optimize_policy(
    filtered: list[TableRef],
    update: Update,
    *,
    weight_version: str,
    engine: TrainEngine,
    store: StepStore,
    check: SelfCheck | None = None,
) -> Optimized:
    """`num_steps_per_rollout` optimizer steps over the kept samples, in the order of the shards."""
    started = time.monotonic()
    slot = Slot("optimize")
    key = store.key(slot, filtered, update.config(store.step) | {"weight_version": weight_version})
    commit = store.committed(slot, key)
    if commit is None:
        renewed = await _renewed(update, weight_version, engine=engine, store=store)
        table = first_groups(concat([read_table(ref) for ref in filtered], ROLLOUTS), update.plan.rollout_batch_size)
        done = Optimized([], [])
        if table.num_rows:
            table = await _prepare(table, update, engine=engine, store=store)
            if check:
                check.prepared(table, WeightVersion.parse(weight_version), step=store.step)
            table = with_importance_weights(table, update.off_policy)
            parts = batches(table, update.plan.num_steps_per_rollout)
            if check:
                require_plan(table, parts, update.plan, step=store.step)
            done = await _apply(parts, update.loss, key=key, engine=engine, store=store, check=check)
            if update.algorithm.old_logprobs == "recompute":
                done = replace(done, mismatch=mismatch_metrics(table, update.off_policy))
        tables = {f"batch-{index:03d}": ref for index, ref in enumerate(done.batches)}
        record = {"update": asdict(update.loss), "results": [asdict(result) for result in done.results], **renewed}
        record |= {_MISMATCH: done.mismatch} if done.mismatch else {}
        commit = store.commit(slot, key, tables, record=record, started=started)
    else:
        # The engine may be a new one: it applies what it has not, and answers what it has.
        await asyncio.to_thread(replay, commit, engine)
    results = stored_results(commit)
    require_progress(results, update.algorithm.max_skipped_steps, store)
    return Optimized(batch_refs(commit), results, commit.record.get(_MISMATCH, {}))
