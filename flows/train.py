"""The loop: `train` runs `iteration` for every step, on engines that live as long as the run."""

import asyncio
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass

from prefect import flow
from prefect.runtime import flow_run

from milepost.engines.fleet import Fleet, fleet, is_joined, joined_cluster
from milepost.engines.protocols import WeightVersion
from milepost.flows.iteration import Position, iteration
from milepost.flows.plan import RunPlan, make_plan, notices
from milepost.flows.progress import progress_bar, say, step_text
from milepost.flows.report import write_report
from milepost.flows.services import running
from milepost.flows.tracker import Tracker, open_tracker, tracking_uri
from milepost.storage import files, manifest, runs
from milepost.storage.journal import StepStore
from milepost.storage.lease import hold
from milepost.storage.parameters import (
    AlgorithmSection,
    CheckpointSection,
    DataSection,
    EnginesSection,
    EvalSection,
    FilterSection,
    ModelSection,
    OptimizerSection,
    Parameters,
    PerfSection,
    RewardSection,
    RolloutSection,
    SyncSection,
    TrackingSection,
)
from milepost.storage.prompt_order import Cursor
from milepost.storage.prompts import PromptSet
from milepost.storage.provenance import provenance
from milepost.storage.runs import RunFolder, RunRecord
from milepost.storage.schema import PROMPTS
from milepost.storage.tables import TableRef, write_table
from milepost.tasks.evaluate import Accuracy, evaluate_policy
from milepost.tasks.generate import Sampling, sampling_params
from milepost.tasks.sync import push_weights


@dataclass(frozen=True)
class Launched:
    """A created run: its folder, its plan, and its prompt sets as stored."""

    plan: RunPlan
    folder: RunFolder
    record: RunRecord
    eval_prompts: TableRef | None
    fence: int = 0


def _store_prompts(folder: RunFolder, prompts: PromptSet, name: str) -> TableRef:
    return write_table(folder.prompts(name), prompts.table, PROMPTS)


def create_run(plan: RunPlan, folder: RunFolder, *, fence: int = 0) -> Launched:
    """Publish the run's prompts and then its `run.json`; a name that is taken is refused. `fence` is the caller's."""
    prompts = _store_prompts(folder, plan.prompts, "train")
    held_out = _store_prompts(folder, plan.eval_prompts, "eval") if plan.eval_prompts else None
    counts = {"too_long": plan.prompts.too_long, "bad_lines": plan.prompts.bad_lines}
    record = RunRecord(
        run_id=plan.run,
        steps=plan.steps,
        parameters=plan.parameters,
        parameters_digest=runs.parameters_digest(plan.parameters),
        provenance=provenance(),
        data={"prompts": asdict(prompts), "eval": asdict(held_out) if held_out else None, **counts},
        model={"path": plan.parameters.model.path, "folder": plan.model_dir, "config": plan.model_config},
    )
    runs.create(folder, record)
    return Launched(plan, folder, record, held_out, fence)


async def first_position(launched: Launched, engines: Fleet) -> Position:
    """The start of the prompt set, and version 0: the trainer's own weights, loaded into every engine."""
    version = await push_weights(
        0,
        launched.plan.parameters.sync,
        folder=launched.folder,
        trainer=engines.trainer,
        engines=list(engines.engines),
        router_url=engines.router_url,
    )
    return Position(Cursor(), version, launched.fence)


async def evaluate(launched: Launched, version: WeightVersion, router_url: str) -> Accuracy | None:
    """Held-out accuracy of `version`; None when the run has nothing to evaluate on."""
    if launched.eval_prompts is None:
        return None
    parameters = launched.plan.parameters
    rollout = parameters.rollout
    if parameters.eval.max_new_tokens is not None:
        rollout = rollout.model_copy(update={"max_new_tokens": parameters.eval.max_new_tokens})
    folder = files.join(launched.folder.uri, "evals", f"{version.step:06d}")
    return await evaluate_policy(
        launched.eval_prompts,
        Sampling(rollout.function, sampling_params(rollout), 1, parameters.model.context_length, parameters.data.seed),
        rollout,
        parameters.reward,
        weight_version=str(version),
        router_url=router_url,
        store=StepStore(folder, launched.plan.run, version.step, launched.fence),
    )


def eval_due(step: int, steps: int, every: int) -> bool:
    """Whether the weights after `step` steps are evaluated: before the first, every `every`, and after the last."""
    return every > 0 and (step in (0, steps) or step % every == 0)


async def run_steps(launched: Launched, engines: Fleet, tracker: Tracker) -> Position:
    """Every step in order, with evaluation where it is due."""
    plan, folder = launched.plan, launched.folder
    position = await first_position(launched, engines)
    every = plan.parameters.eval.every_steps
    with progress_bar(plan.run, plan.steps) as advance:
        for step in range(plan.steps):
            if eval_due(step, plan.steps, every):
                await evaluate(launched, position.version, engines.router_url)
            begun = time.monotonic()
            position = await iteration(plan.root, plan.run, step, position)
            closed = manifest.load(folder, step)
            tracker.step(closed)
            advance(step_text(closed.metrics, time.monotonic() - begun))
        if eval_due(plan.steps, plan.steps, every):
            await evaluate(launched, position.version, engines.router_url)
    return position


async def run_training(plan: RunPlan, folder: RunFolder, *, fence: int = 0) -> None:
    """Create the run, start its engines, train, and leave nothing running."""
    launched = create_run(plan, folder, fence=fence)
    services = running()
    if services.ray_address is None and not is_joined():
        say("no Ray head runs, so this run starts its own")
    uri = tracking_uri(plan.parameters.tracking, root=plan.root, running_url=services.mlflow_url)
    flow_run_id = str(flow_run.id or "")
    with ExitStack() as stack:
        tracker = stack.enter_context(open_tracker(folder, launched.record, uri=uri, flow_run_id=flow_run_id))
        stack.callback(write_report, folder)
        stack.enter_context(joined_cluster(services.ray_address))
        engines = stack.enter_context(fleet(plan.run, plan.parameters, plan.model_dir))
        await run_steps(launched, engines, tracker)


@flow(name="train", flow_run_name="{run}", retries=0)
async def train(
    run: str,
    root: str = "runs",
    steps: int = 10,
    model: ModelSection = ModelSection(),
    data: DataSection = DataSection(),
    rollout: RolloutSection = RolloutSection(),
    reward: RewardSection = RewardSection(),
    filter: FilterSection = FilterSection(),
    algorithm: AlgorithmSection = AlgorithmSection(),
    optimizer: OptimizerSection = OptimizerSection(),
    perf: PerfSection = PerfSection(),
    sync: SyncSection = SyncSection(),
    checkpoint: CheckpointSection = CheckpointSection(),
    eval: EvalSection = EvalSection(),
    engines: EnginesSection = EnginesSection(),
    tracking: TrackingSection = TrackingSection(),
) -> str:
    """Train a model by reinforcement learning; returns the folder of the run.

    Args:
        run: Name of the run: a folder under root, and the name of everything that belongs to it.
        root: Folder of all runs, on any filesystem that fsspec knows.
        steps: Trips around the DAG.
        model: Which model, and how it is split over devices.
        data: Which prompts, and how many of them a step takes.
        rollout: How samples are generated.
        reward: How samples are scored.
        filter: Which groups are trained on.
        algorithm: Advantages, loss, and the optimizer steps of a step.
        optimizer: Adam and its schedule.
        perf: What fits in memory, and how fast it goes.
        sync: How new weights reach the rollout engines.
        checkpoint: When state is saved.
        eval: Held-out evaluation during training.
        engines: Which processes hold the models.
        tracking: Where lineage is indexed.
    """
    parameters = Parameters(
        model=model,
        data=data,
        rollout=rollout,
        reward=reward,
        filter=filter,
        algorithm=algorithm,
        optimizer=optimizer,
        perf=perf,
        sync=sync,
        checkpoint=checkpoint,
        eval=eval,
        engines=engines,
        tracking=tracking,
    )
    folder = runs.run_folder(root, run)
    runs.require_new(folder)
    quarantine = files.join(folder.uri, "quarantine.jsonl")
    plan = await asyncio.to_thread(make_plan, run, root, steps, parameters, quarantine_uri=quarantine)
    for notice in notices(plan):
        say(notice)
    with hold(folder) as lease:
        await run_training(plan, folder, fence=lease.fence)
    return folder.uri
