"""What a person starts: `train` a run, and `resume` one that was stopped, killed or asked to go further."""

from collections.abc import Sequence

from prefect import flow
from prefect.runtime import flow_run
from pydantic import PositiveInt

from milepost.flows import crashed
from milepost.flows.claim import claimed, queued
from milepost.flows.engine_slots import engine_slots
from milepost.flows.loop import run_training
from milepost.flows.outcome import recorded
from milepost.flows.own_thread import in_own_thread
from milepost.flows.progress import say
from milepost.flows.recipe import absolute_root
from milepost.flows.run_logs import logged
from milepost.flows.run_name import made_name, shown_name
from milepost.flows.start import begin_run, ended, reopen_run
from milepost.storage import files, runs
from milepost.storage.off_policy import OffPolicySection
from milepost.storage.parameters import (
    CheckpointSection,
    DataSection,
    EnginesSection,
    EvalSection,
    FilterSection,
    ModelSection,
    Parameters,
    RewardSection,
    RolloutSection,
    SyncSection,
    TrackingSection,
)
from milepost.storage.parent import ParentRun
from milepost.storage.runs import RunFolder
from milepost.storage.training import (
    AlgorithmSection,
    CriticSection,
    OptimizerSection,
    PerfSection,
    ReferenceSection,
)
from milepost.storage.watched import AlertSection, CheckSection, StopSection


@recorded
async def work_on(
    folder: RunFolder,
    root: str,
    steps: int | None,
    parameters: Parameters | None,
    allowed: Sequence[str] = (),
    *,
    parent: ParentRun | None = None,
) -> str:
    """Begin the run, from a `parent` if there is one, or go on with it, while this process alone holds it."""
    async with claimed(folder, root) as fence:
        if files.exists(folder.record):
            launched = await in_own_thread(reopen_run, root, folder, steps, parameters, allowed=allowed, fence=fence)
        else:
            assert steps is not None and parameters is not None
            launched = await in_own_thread(begin_run, root, folder, steps, parameters, fence=fence, parent=parent)
        if launched.is_finished:
            say(ended(launched))
        else:
            with logged(folder, str(flow_run.id or "")):
                async with engine_slots(launched.parameters, queued(folder, fence)):
                    await run_training(launched)
    return folder.uri


@flow(name="train", flow_run_name=shown_name, retries=0, on_crashed=[crashed.end_below])
async def train(
    run: str = "",
    root: str = "runs",
    steps: PositiveInt = 10,
    model: ModelSection = ModelSection(),
    data: DataSection = DataSection(),
    rollout: RolloutSection = RolloutSection(),
    reward: RewardSection = RewardSection(),
    filter: FilterSection = FilterSection(),
    algorithm: AlgorithmSection = AlgorithmSection(),
    off_policy: OffPolicySection = OffPolicySection(),
    reference: ReferenceSection = ReferenceSection(),
    critic: CriticSection = CriticSection(),
    optimizer: OptimizerSection = OptimizerSection(),
    perf: PerfSection = PerfSection(),
    sync: SyncSection = SyncSection(),
    checkpoint: CheckpointSection = CheckpointSection(),
    eval: EvalSection = EvalSection(),
    stop: StopSection = StopSection(),
    alert: AlertSection = AlertSection(),
    check: CheckSection = CheckSection(),
    engines: EnginesSection = EnginesSection(),
    tracking: TrackingSection = TrackingSection(),
    allow_change: tuple[str, ...] = (),
) -> str:
    """Train a model by reinforcement learning, or go on with a run of this name; returns the folder of the run.

    Args:
        run: Name of the run: a folder under root, and the name of everything that belongs to it; made when empty.
        root: Folder of all runs, on any filesystem that fsspec knows.
        steps: Trips around the DAG.
        model: Which model, and how it is split over devices.
        data: Which prompts, and how many of them a step takes.
        rollout: How samples are generated.
        reward: How samples are scored.
        filter: Which groups are trained on.
        algorithm: Advantages, loss, and the optimizer steps of a step.
        off_policy: What is done where trainer and engine differ in how likely a token is, or samples are old.
        reference: The frozen policy that the trained one is compared with.
        critic: The model that says how much reward is still to come, where advantages need one.
        optimizer: Adam and its schedule.
        perf: What fits in memory, and how fast it goes.
        sync: How new weights reach the rollout engines.
        checkpoint: When state is saved.
        eval: Held-out evaluation during training.
        stop: When the run ends before its last step.
        alert: Which metrics Prefect is told of when they cross a bound.
        check: What a run holds of itself at every step.
        engines: Which processes hold the models.
        tracking: Where lineage is indexed.
        allow_change: Parameters, as section.field, that a run of this name may change when it goes on.
    """
    parameters = Parameters(
        model=model,
        data=data,
        rollout=rollout,
        reward=reward,
        filter=filter,
        algorithm=algorithm,
        off_policy=off_policy,
        reference=reference,
        critic=critic,
        optimizer=optimizer,
        perf=perf,
        sync=sync,
        checkpoint=checkpoint,
        eval=eval,
        stop=stop,
        alert=alert,
        check=check,
        engines=engines,
        tracking=tracking,
    )
    root = absolute_root(root)
    return await work_on(runs.run_folder(root, run or made_name()), root, steps, parameters, allow_change)


@flow(name="resume", flow_run_name="{run}", retries=0, on_crashed=[crashed.end_below])
async def resume(
    run: str, root: str = "runs", steps: PositiveInt | None = None, allow_change: tuple[str, ...] = ()
) -> str:
    """Go on with a run at its first unfinished stage; returns the folder of the run.

    Args:
        run: Name of the run.
        root: Folder of all runs.
        steps: Trips around the DAG in all, if other than before.
        allow_change: Parameters, as section.field, that may differ from how the run began.
    """
    root = absolute_root(root)
    folder = runs.run_folder(root, run)
    runs.load(folder)
    return await work_on(folder, root, steps, None, allow_change)
