"""One step: the six tasks of the DAG, with shards that pass through generate, score and filter on their own."""

import asyncio
from contextlib import nullcontext
from dataclasses import dataclass, replace

from prefect import flow

from milepost.engines.gpu_placement import shares_gpus
from milepost.engines.protocols import WeightVersion
from milepost.flows.outcome import recorded
from milepost.flows.step_context import Position, StepContext, Unshown, open_step
from milepost.storage.accounting import accounting
from milepost.storage.manifest import StepManifest
from milepost.storage.parent import beside, parent_run, steps_before
from milepost.storage.prompt_order import Cursor
from milepost.storage.retention import retain
from milepost.storage.schema import ROLLOUTS
from milepost.storage.tables import TableRef, concat, read_table
from milepost.tasks.colocate import Turns
from milepost.tasks.conversation_metrics import conversation_metrics
from milepost.tasks.early_stop import EarlyStop
from milepost.tasks.filter import Filtered, filter_rollouts, is_trained
from milepost.tasks.generate import Shard, generate_rollouts
from milepost.tasks.optimize import Optimized, TooFewGroups, optimize_policy, trained_groups
from milepost.tasks.rollout_metrics import dropped_groups, engine_metrics, rollout_metrics
from milepost.tasks.sample import Sampled, sample_prompts
from milepost.tasks.score import score_rollouts
from milepost.tasks.score_ahead import ScoreAhead
from milepost.tasks.self_check import SelfCheck
from milepost.tasks.steps import (
    StepOutcome,
    close_step,
    engine_work,
    reused_tokens,
    served_groups,
    stage_seconds,
    update_metrics,
)
from milepost.tasks.sync import Synced, sync_section, sync_weights
from milepost.tasks.take import take_stages
from milepost.tasks.update import Update


@dataclass(frozen=True)
class Collected:
    """The filtered shards of a step, over all its rounds."""

    shards: list[TableRef]
    cursor: Cursor
    train: bool


async def shard_pipeline(sampled: Sampled, shard: Shard, context: StepContext, early: EarlyStop | None) -> Filtered:
    """One shard from prompts to kept samples; a slow shard delays no other, but those of a round may end together.

    Its groups are scored as they are finished; where a round may end early, whoever judges that does it.
    """
    ahead = context.score_ahead() if early is None else None
    async with ahead or nullcontext():
        return await _shard_stages(sampled, shard, context, early, ahead)


async def _shard_stages(
    sampled: Sampled, shard: Shard, context: StepContext, early: EarlyStop | None, ahead: ScoreAhead | None
) -> Filtered:
    parameters, store = context.parameters, context.store
    generated = await context.deadlines.run(
        generate_rollouts,
        sampled.prompts,
        shard,
        context.sampling,
        parameters.rollout,
        weight_version=str(context.version),
        router_url=context.fleet.router_url,
        store=store,
        carried=sampled.carried,
        early=early,
        ahead=ahead,
    )
    scored = await context.deadlines.run(
        score_rollouts,
        generated,
        shard,
        parameters.reward,
        run=context.folder.run_id,
        store=store,
        known=early.verdicts if early else {},
        ahead=ahead,
    )
    filtered: Filtered = await context.deadlines.run(
        filter_rollouts, scored, shard, parameters.filter, store=store, oldest=context.oldest(shard)
    )
    if early is not None:
        early.found(shard.index, filtered.kept_groups)
    return filtered


async def run_round(sampled: Sampled, round_: int, context: StepContext, *, missing: int) -> list[Filtered]:
    """All shards of a round; an over-sampled one ends once the `missing` groups are kept."""
    count = context.shards(sampled.prompts, round_)
    early = context.early_stop(missing)
    async with asyncio.TaskGroup() as group:
        running = [
            group.create_task(shard_pipeline(sampled, Shard(index, count, round_), context, early))
            for index in range(count)
        ]
    return [done.result() for done in running]


async def collect(cursor: Cursor, context: StepContext) -> Collected:
    """Rounds of sampling until enough groups are kept or the rounds are used up; those that are taken are all seen."""
    filtering, wanted = context.parameters.filter, context.plan.rollout_batch_size
    shards: list[TableRef] = []
    kept = 0
    for round_ in range(context.rounds):
        sampled = await context.deadlines.run(
            sample_prompts,
            context.order,
            cursor,
            context.round_size,
            round_=round_,
            store=context.store,
            goes_on=context.goes_on and round_ == 0,
        )
        cursor = sampled.cursor
        filtered = await run_round(sampled, round_, context, missing=wanted - kept)
        shards += [part.rollouts for part in filtered]
        kept += sum(part.kept_groups for part in filtered)
        if kept >= wanted and not context.taken:
            break
    if kept < wanted and filtering.on_too_few == "fail":
        raise TooFewGroups(
            f"step {context.store.step} kept {kept} of {wanted} groups after {context.rounds} rounds: "
            "raise filter.max_rounds or choose another filter.on_too_few"
        )
    return Collected(shards, cursor, train=is_trained(kept, wanted, filtering))


def checkpoint_due(step: int, steps: int, every: int) -> bool:
    """Whether the weights after `step` are saved: the last always, others every `every` steps."""
    return step + 1 == steps or (every > 0 and (step + 1) % every == 0)


async def take(context: StepContext) -> StepContext:
    """The context with the tables that come from another run in the journal, where some do."""
    parent = parent_run(context.record)
    if parent is None:
        return context
    source, step = beside(context.folder, parent.run), parent.begin + context.store.step
    taken = await context.deadlines.run(take_stages, source, step, context.course.taken, store=context.store)
    return replace(context, taken=tuple(taken))


async def optimize(collected: Collected, context: StepContext) -> Optimized:
    update = Update.of(context.parameters, steps_before(parent_run(context.record)))
    optimized: Optimized = await context.deadlines.run(
        optimize_policy,
        collected.shards if collected.train else [],
        update,
        weight_version=str(context.version),
        engine=context.trainer,
        store=context.store,
        check=SelfCheck.of(context.parameters, update),
    )
    return optimized


async def sync(context: StepContext, optimized: Optimized) -> Synced:
    """Weights and checkpoints are not in the journal, so an owner that lost the run is stopped here."""
    context.store.check_fence()
    step, saving = context.store.step, context.parameters.checkpoint
    synced: Synced = await context.deadlines.after(optimized).run(
        sync_weights,
        step + 1,
        sync_section(context.parameters),
        save=checkpoint_due(step, context.record.steps, saving.every_steps),
        folder=context.folder,
        trainer=context.trainer,
        engines=list(context.fleet.engines),
        router_url=context.fleet.router_url,
    )
    return synced


@dataclass(frozen=True)
class Improved:
    """What training came to in a step."""

    optimized: Optimized
    synced: Synced

    @property
    def metrics(self) -> dict[str, float]:
        made = update_metrics(self.optimized.results, self.optimized.critic) | self.optimized.mismatch
        return made | {"time/sync": self.synced.seconds} | self.synced.metrics


async def improve(collected: Collected, context: StepContext) -> Improved:
    """The last two stages: from kept samples to new weights, and those in every engine."""
    turns = Turns(shares_gpus(context.parameters), context.trainer, context.fleet.engines)
    await turns.training()
    optimized = await optimize(collected, context)
    await turns.syncing()
    synced = await sync(context, optimized)
    await turns.generating()
    return Improved(optimized, synced)


def close(context: StepContext, collected: Collected, improved: Improved | None) -> StepManifest:
    """Close the step. Where nothing is trained, the weights stay what they were."""
    table = concat([read_table(ref) for ref in collected.shards], ROLLOUTS)
    trained = trained_groups(improved.optimized.batches) if improved else None
    counts = accounting(served_groups(context.store), table, trained)
    metrics = rollout_metrics(table, trained=trained, reused_tokens=reused_tokens(context.store))
    metrics |= conversation_metrics(table) if context.parameters.rollout.tools else {}
    metrics |= engine_metrics(engine_work(context.store)) | dropped_groups(counts)
    metrics |= stage_seconds(context.store) | (improved.metrics if improved else {})
    return close_step(
        context.store,
        context.folder,
        StepOutcome(
            context.version,
            improved.synced.version if improved else context.version,
            collected.cursor,
            improved.synced.checkpoint if improved else "",
            context.record.attempt,
            context.record.parameters_digest,
        ),
        counts=counts,
        metrics=metrics,
    )


@flow(name="iteration", flow_run_name="step-{step}", validate_parameters=False)
@recorded
async def iteration(root: str, run: str, step: int, start: Position, given: Unshown | None = None) -> Position:
    """Step `step` of `run`, whose engines are running and hold `start.version`; see `open_step` for what is given."""
    parameters = given.parameters if given else None
    context = await take(open_step(root, run, step, start.version, start.fence, parameters))
    collected = await collect(start.cursor, context)
    improved = await improve(collected, context) if context.course.trains else None
    closed = close(context, collected, improved)
    if closed.checkpoint:
        # Not before the step is closed: until then the run goes back to the checkpoint before.
        kept = context.parameters.checkpoint
        retain(context.folder, keep_last=kept.keep_last, keep_every=kept.keep_every)
    return Position(collected.cursor, WeightVersion.parse(closed.version_out), start.fence)
