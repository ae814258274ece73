"""Stages of a finished step, run once more on their stored inputs by the tasks that ran them, and what came of it."""

from dataclasses import dataclass, field
from itertools import zip_longest

import pyarrow as pa

from milepost.engines.protocols import TrainEngine, WeightVersion
from milepost.storage.batch_plan import BatchPlan, batch_plan
from milepost.storage.difference import Comparison, Difference, compare_numbers, compare_tables
from milepost.storage.journal import Commit, Slot, StepStore
from milepost.storage.manifest import StepManifest
from milepost.storage.parameters import Parameters
from milepost.storage.stages import STAGES, Course, Stage
from milepost.storage.tables import TableRef, read_table
from milepost.tasks.critic import named_metrics
from milepost.tasks.filter import filter_rollouts, is_trained
from milepost.tasks.filters import kept_groups
from milepost.tasks.generate import Shard
from milepost.tasks.optimize import Optimized, optimize_policy, optimized
from milepost.tasks.score import score_rollouts
from milepost.tasks.staleness import oldest_version
from milepost.tasks.update import Update

# Those before need rollout engines, and draw anew.
REPLAYED: tuple[Stage, ...] = ("score", "filter", "optimize")

# Of an optimizer step: how long it took, which is another number each time.
_SPEED = ("seconds", "tokens_per_second", "tflops", "mfu")
_TIMINGS = {*_SPEED, *(f"critic-{name}" for name in _SPEED)}

Tables = dict[Slot, TableRef]


def stages_from(first: Stage, course: Course) -> tuple[Stage, ...]:
    """The stages from `first` on that can be run again, of those in `course`."""
    return tuple(stage for stage in REPLAYED[REPLAYED.index(first) :] if course.makes(stage))


@dataclass(frozen=True)
class StoredStep:
    """A finished step: its manifest, what it committed, and the parameters it is to be run with.

    `before` counts the steps that the run's trainer had taken before the first of the run.
    """

    store: StepStore
    manifest: StepManifest
    commits: dict[Slot, Commit]
    parameters: Parameters
    before: int = 0

    @property
    def version_in(self) -> WeightVersion:
        return WeightVersion.parse(self.manifest.version_in)

    @property
    def plan(self) -> BatchPlan:
        return batch_plan(self.parameters)

    def oldest(self, shard: Shard) -> int | None:
        """See `oldest_version`."""
        most = self.parameters.off_policy.max_staleness
        return oldest_version(self.store, shard, version=self.manifest.version_in, max_staleness=most)

    def rollouts(self, stage: str) -> Tables:
        """The tables of every shard of a stage, in the order of rounds and shards."""
        slots = sorted(
            (slot for slot in self.commits if slot.stage == stage), key=lambda slot: (slot.round, slot.shard)
        )
        return {slot: self.commits[slot].tables["rollouts"] for slot in slots}


@dataclass(frozen=True)
class Replayed:
    """What the stages left this time: the tables of each shard, and what came of the batches."""

    shards: Tables = field(default_factory=dict)
    optimized: Optimized | None = None

    def of(self, stage: str) -> Tables:
        return {slot: ref for slot, ref in self.shards.items() if slot.stage == stage}


async def run_again(
    stored: StoredStep,
    stages: tuple[Stage, ...],
    target: StepStore,
    *,
    graders: str,
    trainer: TrainEngine | None,
    chained: bool,
) -> Replayed:
    """Run `stages`, with results in `target`; without `trainer`, all but optimize.

    Each stage is given what it was given then or, when `chained`, what the stage before it has made just now.
    `graders` is the name under which the pool of graders was started.
    """
    shards: Tables = {}

    def given(stage: Stage) -> Tables:
        before = STAGES[STAGES.index(stage) - 1]
        made = {slot: ref for slot, ref in shards.items() if slot.stage == before}
        return made if chained and made else stored.rollouts(before)

    if "score" in stages:
        for slot, ref in given("score").items():
            scored = await score_rollouts(ref, _shard(slot), stored.parameters.reward, run=graders, store=target)
            shards[_same_shard(slot, "score")] = scored
    if "filter" in stages:
        for slot, ref in given("filter").items():
            filtered = filter_rollouts(
                ref, _shard(slot), stored.parameters.filter, store=target, oldest=stored.oldest(_shard(slot))
            )
            shards[_same_shard(slot, "filter")] = filtered.rollouts
    if trainer is None or "optimize" not in stages:
        return Replayed(shards)
    filtered = list(given("optimize").values())
    groups = sum(kept_groups(read_table(ref)) for ref in filtered)
    trained = is_trained(groups, stored.plan.rollout_batch_size, stored.parameters.filter)
    done = await optimize_policy(
        filtered if trained else [],
        Update.of(stored.parameters, stored.before),
        weight_version=str(stored.version_in),
        engine=trainer,
        store=target,
    )
    return Replayed(shards, done)


def _shard(slot: Slot) -> Shard:
    assert slot.shard is not None
    return Shard(slot.shard, slot.shard + 1, slot.round)


def _same_shard(slot: Slot, stage: str) -> Slot:
    return Slot(stage, slot.round, slot.shard)


def kept(stored: StoredStep) -> Replayed:
    """What the stages left, of a step that is stored itself."""
    shards = {slot: ref for stage in REPLAYED[:-1] for slot, ref in stored.rollouts(stage).items()}
    commit = stored.commits.get(Slot("optimize"))
    if commit is None:
        return Replayed(shards)
    return Replayed(shards, optimized(commit))


def compare_stage(stage: Stage, stored: StoredStep, replayed: Replayed, *, tolerance: float) -> Comparison:
    """Every output of a stage, and the numbers of its optimizer steps, against the stored ones.

    It makes no difference that they are of another run, or of another step of it.
    """
    if stage != "optimize":
        before, now = stored.rollouts(stage), replayed.of(stage)
        return _compare_refs(stored, [(str(slot), ref, now[slot]) for slot, ref in before.items()], tolerance)
    assert replayed.optimized is not None
    done, again = optimized(stored.commits[Slot("optimize")]), replayed.optimized
    where = f"optimize of step {stored.store.step}"
    for what, *counts in (
        ("batches", len(done.batches), len(again.batches)),
        ("optimizer steps", len(done.results), len(again.results)),
    ):
        if counts[0] != counts[1]:
            return Comparison(Difference(where, -1, what, *map(str, counts)), float("inf"))
    pairs = [(f"batch {at}", *pair) for at, pair in enumerate(zip(done.batches, again.batches, strict=True))]
    found = _compare_refs(stored, pairs, tolerance)
    for at, numbers in enumerate(zip(batch_numbers(done), batch_numbers(again), strict=True)):
        both = numbers[0].keys() & numbers[1].keys()  # another Milepost measured more, or less
        shared = ({name: each[name] for name in both} for each in numbers)
        found = found.then(
            compare_numbers(f"optimizer step {at} of step {stored.store.step}", *shared, tolerance=tolerance)
        )
    return found


def batch_numbers(done: Optimized) -> list[dict[str, float]]:
    """What came of each batch, but for how long it took."""
    nothing: dict[str, float] = {}
    policy = [{**result.metrics, "applied": float(result.applied)} for result in done.results]
    critic = named_metrics(done.critic.results) if done.critic else []
    batches = [of_critic | of_policy for of_critic, of_policy in zip_longest(critic, policy, fillvalue=nothing)]
    return [{name: value for name, value in batch.items() if name not in _TIMINGS} for batch in batches]


def _compare_refs(stored: StoredStep, pairs: list[tuple[str, TableRef, TableRef]], tolerance: float) -> Comparison:
    """Tables of one digest are equal and need not be read."""
    found = Comparison()
    for what, before, now in pairs:
        if before.digest != now.digest:
            where = f"{what} of step {stored.store.step}"
            tables = (_without_place(read_table(ref)) for ref in (before, now))
            found = found.then(compare_tables(where, *tables, tolerance=tolerance))
    return found


def _without_place(table: pa.Table) -> pa.Table:
    return table.drop_columns(["run_id", "step"])


def compare_weights(stored: StoredStep, digest: str) -> Comparison:
    """The weights after the step against those that its manifest names."""
    wanted = WeightVersion.parse(stored.manifest.version_out).digest
    if wanted == digest:
        return Comparison()
    return Comparison(Difference(f"weights after step {stored.store.step}", -1, "digest", wanted[:16], digest[:16]))
