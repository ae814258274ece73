"""One step: the six tasks of the DAG, with shards that pass through generate, score and filter on their own."""

import asyncio
from dataclasses import dataclass

from prefect import flow

from milepost.engines.fleet import Fleet, connect_fleet
from milepost.engines.protocols import WeightVersion
from milepost.flows.deadline import Deadlines, longest_stages
from milepost.flows.outcome import recorded
from milepost.storage import attempts, runs
from milepost.storage.accounting import accounting
from milepost.storage.batch_plan import BatchPlan, batch_plan
from milepost.storage.journal import StepStore
from milepost.storage.manifest import StepManifest
from milepost.storage.parameters import Parameters
from milepost.storage.prompt_order import Cursor
from milepost.storage.retention import retain
from milepost.storage.runs import RunFolder, RunRecord
from milepost.storage.schema import ROLLOUTS
from milepost.storage.tables import TableRef, concat, read_table
from milepost.tasks.colocate import Turns
from milepost.tasks.filter import Filtered, filter_rollouts, is_trained
from milepost.tasks.generate import Sampling, Shard, generate_rollouts, sampling_params
from milepost.tasks.optimize import Optimized, TooFewGroups, optimize_policy, trained_groups
from milepost.tasks.sample import PromptOrder, sample_prompts
from milepost.tasks.score import score_rollouts
from milepost.tasks.steps import StepOutcome, close_step, rollout_metrics, served_groups, stage_seconds, update_metrics
from milepost.tasks.sync import Synced, sync_weights


@dataclass(frozen=True)
class Position:
    """Where a run stands before a step: the next prompt, and the weights that trainer and engines hold.

    `fence` is the number of the claim that the run is worked on under; 0 without a lease.
    """

    cursor: Cursor
    version: WeightVersion
    fence: int = 0


@dataclass(frozen=True)
class StepContext:
    """What every stage of a step needs."""

    folder: RunFolder
    store: StepStore
    record: RunRecord
    plan: BatchPlan
    order: PromptOrder
    fleet: Fleet
    version: WeightVersion
    deadlines: Deadlines

    @property
    def parameters(self) -> Parameters:
        return self.record.parameters

    @property
    def sampling(self) -> Sampling:
        parameters = self.parameters
        return Sampling(
            function=parameters.rollout.function,
            params=sampling_params(parameters.rollout),
            n_samples_per_prompt=self.plan.n_samples_per_prompt,
            context_length=parameters.model.context_length,
            seed=parameters.data.seed,
        )


@dataclass(frozen=True)
class Collected:
    """The filtered shards of a step, over all its rounds."""

    shards: list[TableRef]
    cursor: Cursor
    train: bool


async def shard_pipeline(prompts: TableRef, shard: Shard, context: StepContext) -> Filtered:
    """One shard from prompts to kept samples; a slow shard delays no other."""
    parameters, store = context.parameters, context.store
    generated = await context.deadlines.run(
        generate_rollouts,
        prompts,
        shard,
        context.sampling,
        parameters.rollout,
        weight_version=str(context.version),
        router_url=context.fleet.router_url,
        store=store,
    )
    scored = await context.deadlines.run(
        score_rollouts, generated, shard, parameters.reward, run=context.folder.run_id, store=store
    )
    filtered: Filtered = await context.deadlines.run(filter_rollouts, scored, shard, parameters.filter, store=store)
    return filtered


async def run_round(prompts: TableRef, round_: int, context: StepContext) -> list[Filtered]:
    count = min(context.parameters.rollout.shards, prompts.rows)
    async with asyncio.TaskGroup() as group:
        running = [
            group.create_task(shard_pipeline(prompts, Shard(index, count, round_), context)) for index in range(count)
        ]
    return [done.result() for done in running]


async def collect(cursor: Cursor, context: StepContext) -> Collected:
    """Rounds of sampling until enough groups are kept or the rounds are used up."""
    filtering, wanted = context.parameters.filter, context.plan.rollout_batch_size
    shards: list[TableRef] = []
    kept = 0
    for round_ in range(filtering.max_rounds):
        sampled = await context.deadlines.run(
            sample_prompts, context.order, cursor, wanted, round_=round_, store=context.store
        )
        cursor = sampled.cursor
        filtered = await run_round(sampled.prompts, round_, context)
        shards += [part.rollouts for part in filtered]
        kept += sum(part.kept_groups for part in filtered)
        if kept >= wanted:
            break
    if kept < wanted and filtering.on_too_few == "fail":
        raise TooFewGroups(
            f"step {context.store.step} kept {kept} of {wanted} groups after {filtering.max_rounds} rounds: "
            "raise filter.max_rounds or choose another filter.on_too_few"
        )
    return Collected(shards, cursor, train=is_trained(kept, wanted, filtering))


def checkpoint_due(step: int, steps: int, every: int) -> bool:
    """Whether the weights after `step` are saved: the last always, others every `every` steps."""
    return step + 1 == steps or (every > 0 and (step + 1) % every == 0)


def open_step(root: str, run: str, step: int, version: WeightVersion, fence: int = 0) -> StepContext:
    """The context of a step, from the run's own record and its running engines."""
    folder = runs.run_folder(root, run)
    record = attempts.current(folder)
    return StepContext(
        folder=folder,
        store=StepStore(folder.step(step), run, step, fence),
        record=record,
        plan=batch_plan(record.parameters),
        order=PromptOrder(
            TableRef(**record.data["prompts"]), record.parameters.data.seed, record.parameters.data.shuffle
        ),
        fleet=connect_fleet(run, record.parameters),
        version=version,
        deadlines=Deadlines(record.parameters.engines, longest_stages(folder, step)),
    )


async def optimize(collected: Collected, context: StepContext) -> Optimized:
    optimized: Optimized = await context.deadlines.run(
        optimize_policy,
        collected.shards if collected.train else [],
        context.parameters.algorithm,
        context.plan,
        weight_version=str(context.version),
        engine=context.fleet.trainer,
        store=context.store,
    )
    return optimized


async def sync(context: StepContext, *, save: bool) -> Synced:
    """Weights and checkpoints are not in the journal, so an owner that lost the run is stopped here."""
    context.store.check_fence()
    synced: Synced = await context.deadlines.run(
        sync_weights,
        context.store.step + 1,
        context.parameters.sync,
        save=save,
        folder=context.folder,
        trainer=context.fleet.trainer,
        engines=context.fleet.engines,
        router_url=context.fleet.router_url,
    )
    return synced


def close(context: StepContext, collected: Collected, optimized: Optimized, synced: Synced) -> StepManifest:
    table = concat([read_table(ref) for ref in collected.shards], ROLLOUTS)
    seconds = stage_seconds(context.store) | {"time/sync": synced.seconds}
    metrics = rollout_metrics(table) | update_metrics(optimized.results) | seconds | synced.metrics
    return close_step(
        context.store,
        context.folder,
        StepOutcome(
            context.version,
            synced.version,
            collected.cursor,
            synced.checkpoint,
            context.record.attempt,
            context.record.parameters_digest,
        ),
        counts=accounting(served_groups(context.store), table, trained_groups(optimized.batches)),
        metrics=metrics,
    )


@flow(name="iteration", flow_run_name="step-{step}", validate_parameters=False)
@recorded
async def iteration(root: str, run: str, step: int, start: Position) -> Position:
    """Step `step` of `run`, whose engines are running and hold `start.version`."""
    context = open_step(root, run, step, start.version, start.fence)
    parameters = context.parameters.checkpoint
    collected = await collect(start.cursor, context)
    turns = Turns(context.parameters.perf.colocate, context.fleet.trainer, context.fleet.engines)
    await turns.training()
    optimized = await optimize(collected, context)
    await turns.syncing()
    synced = await sync(context, save=checkpoint_due(step, context.record.steps, parameters.every_steps))
    await turns.generating()
    close(context, collected, optimized, synced)
    if synced.checkpoint:
        # Not before the step is closed: until then the run goes back to the checkpoint before.
        retain(context.folder, keep_last=parameters.keep_last, keep_every=parameters.keep_every)
    return Position(collected.cursor, synced.version, start.fence)
