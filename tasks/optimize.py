"""The fifth node: advantages, and one optimizer step for each batch of the kept samples."""

import asyncio
import itertools
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

import pyarrow as pa
from prefect import task
from prefect.cache_policies import NO_CACHE

from milepost.engines.protocols import TrainEngine, UpdateParams, UpdateResult
from milepost.storage.journal import Commit, Slot, StepStore
from milepost.storage.schema import ROLLOUTS
from milepost.storage.tables import TableRef, concat, read_table
from milepost.storage.weight_version import WeightVersion
from milepost.tasks.critic import Critique, as_recorded, critic_metrics, stored_critique
from milepost.tasks.mismatch import mismatch_metrics
from milepost.tasks.off_policy import with_importance_weights
from milepost.tasks.prepare import prepare
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
    """What the optimizer did with a step: `results` has one entry a batch, and none when the policy was not trained.

    That is when the step was skipped, and where only the `critic` is trained. `mismatch` says how far trainer and
    engine were apart before it; nothing where only one of them was asked.
    """

    batches: list[TableRef]
    results: list[UpdateResult]
    mismatch: dict[str, float] = field(default_factory=dict)
    critic: Critique | None = None

    @property
    def applied(self) -> list[bool]:
        """Of each batch that had a token to train, whether it was learnt by all that were to learn it."""
        columns = [self.results, self.critic.results] if self.critic else [self.results]
        batches = zip(*(column for column in columns if column), strict=True)
        return [all(result.applied for result in batch) for batch in batches if not batch[0].is_empty]


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


def skipped_in_a_row(applied: Sequence[bool], newest: int) -> int:
    """The most optimizer steps that were skipped one after the other, in a row that ends among the `newest` last."""
    in_a_row = [0]
    for done in applied:
        in_a_row.append(0 if done else in_a_row[-1] + 1)
    return max(in_a_row[len(in_a_row) - newest :], default=0)


def stored_results(commit: Commit) -> list[UpdateResult]:
    """What came of each batch of a committed optimize stage."""
    return [UpdateResult(**result) for result in commit.record["results"]]


def optimized(commit: Commit) -> Optimized:
    """What a committed optimize stage came to."""
    mismatch = commit.record.get(_MISMATCH, {})
    return Optimized(batch_refs(commit), stored_results(commit), mismatch, stored_critique(commit))


def history(store: StepStore) -> list[bool]:
    """Whether each batch of the run so far was learnt, this step's own commit included; not empty ones."""
    commits = (store.at(step).stored(Slot("optimize")) for step in range(store.step + 1))
    return [applied for commit in commits if commit for applied in optimized(commit).applied]


def require_progress(done: Optimized, limit: int, store: StepStore) -> None:
    """TooManySkips when more than `limit` optimizer steps in a row, up to one of `done`, were skipped."""
    skipped = skipped_in_a_row(history(store), len(done.applied))
    if skipped > limit:
        policy = any(not (result.applied or result.is_empty) for result in done.results)
        raise TooManySkips(
            f"{skipped} optimizer steps in a row had a loss or gradient that is not finite, "
            f"algorithm.max_skipped_steps allows {limit}: lower {'optimizer.lr' if policy else 'critic.lr'}, or look "
            f"at the batches in {store.uri}"
        )


async def _renewed(update: Update, weight_version: str, *, engine: TrainEngine, store: StepStore) -> dict[str, str]:
    """Let the policy become the reference where that is due; for the record, of which weights."""
    if not update.renews_reference(store.step):
        return {}
    await asyncio.to_thread(engine.renew_reference, weight_version)
    return {REFERENCE: weight_version}


async def _apply(
    parts: list[pa.Table], update: Update, *, key: str, engine: TrainEngine, store: StepStore, check: SelfCheck | None
) -> Optimized:
    """Each batch teaches the critic first, where there is one, and then the policy."""
    refs = [store.write(f"batch-{index:03d}", part, ROLLOUTS) for index, part in enumerate(parts)]
    results: list[UpdateResult] = []
    taught: list[UpdateResult] = []
    for index, ref in enumerate(refs):
        own = f"{key}-{index:03d}"
        if update.critic:
            learnt = await asyncio.to_thread(engine.critic_step, ref, update.value_loss, own)
            assert learnt is not None
            taught.append(learnt)
        if update.trains_policy(store.step):
            is_first = not any(result.applied for result in results)
            results.append(await asyncio.to_thread(engine.step, ref, update.loss, own))
            if check and is_first:
                check.first_update(results[-1], step=store.step)
        if (results or taught)[-1].is_empty:
            _log.warning("no sample of batch %s has a token to train: it is left out", ref.uri)
    return Optimized(refs, results, critic=Critique(update.value_loss, taught) if update.critic else None)


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
    update, done = UpdateParams(**commit.record["update"]), optimized(commit)
    for index, ref in enumerate(done.batches):
        if done.critic:
            engine.critic_step(ref, done.critic.update, done.critic.results[index].key)
        if done.results:
            engine.step(ref, update, done.results[index].key)
    return len(done.batches)


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
            table = await prepare(table, update, engine=engine, store=store)
            if check:
                check.prepared(table, WeightVersion.parse(weight_version), step=store.step)
            table = with_importance_weights(table, update.off_policy)
            parts = batches(table, update.plan.num_steps_per_rollout)
            if check:
                require_plan(table, parts, update.plan, step=store.step)
            done = await _apply(parts, update, key=key, engine=engine, store=store, check=check)
            done = _measured(done, table, update)
        tables = {f"batch-{index:03d}": ref for index, ref in enumerate(done.batches)}
        record = {"update": asdict(update.loss), "results": [asdict(result) for result in done.results], **renewed}
        record |= ({_MISMATCH: done.mismatch} if done.mismatch else {}) | as_recorded(done.critic)
        commit = store.commit(slot, key, tables, record=record, started=started)
    else:
        # The engine may be a new one: it applies what it has not, and answers what it has.
        await asyncio.to_thread(replay, commit, engine)
    done = optimized(commit)
    require_progress(done, update.algorithm.max_skipped_steps, store)
    return done


def _measured(done: Optimized, table: pa.Table, update: Update) -> Optimized:
    """With what is measured of the samples of the step, beside what each batch came to."""
    if update.algorithm.old_logprobs == "recompute":
        done = replace(done, mismatch=mismatch_metrics(table, update.off_policy))
    if done.critic:
        done = replace(done, critic=replace(done.critic, metrics=critic_metrics(table)))
    return done
