"""`milepost replay`: stages of finished steps run again from what is stored, and a verdict on every output.

No rollout engine is needed. The trainer starts from the checkpoint before the first step, with the batches stored since
applied once more, and what it computes is written beside the runs and thrown away, or kept as a run of its own.
"""

import asyncio
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from prefect import flow

from milepost.engines.cluster import gpus
from milepost.engines.graders import GraderPool
from milepost.engines.protocols import TrainEngine
from milepost.flows.other_models import other_models
from milepost.flows.outcome import recorded
from milepost.flows.progress import progress_bar
from milepost.flows.ray_cluster import joined_ray
from milepost.flows.recipe import absolute_root
from milepost.flows.replay_into import First, check_kept, keep, kept_verdict
from milepost.flows.replay_verdict import ReplayVerdict, StageVerdict, as_json, stage_verdicts, stored_step, worst
from milepost.flows.step_range import require_steps, step_range
from milepost.flows.trainer_alone import trainer_alone
from milepost.storage import manifest, runs
from milepost.storage.journal import StepStore
from milepost.storage.parameters import Parameters, RewardSection
from milepost.storage.parent import course_of
from milepost.storage.runs import RunFolder, RunRecord
from milepost.storage.stages import Stage
from milepost.tasks.recover import restore_before
from milepost.tasks.replay import StoredStep, run_again, stages_from

GPU_TOLERANCE = 0.05  # kernels add in another order each time; log-probabilities of bfloat16 move by about this


@asynccontextmanager
async def trainer_before(
    folder: RunFolder, record: RunRecord, step: int, name: str, *, parameters: Parameters | None = None
) -> AsyncIterator[TrainEngine | None]:
    """The trainer as it was before `step`, for steps under `parameters` if other than the run's; None without one."""
    if not course_of(record).trains:
        yield None
        return
    used = parameters or record.parameters
    async with trainer_alone(name, used, record.model["folder"], other_models(used, record.model)) as trainer:
        await asyncio.to_thread(restore_before, folder, step, trainer)
        yield trainer


@contextmanager
def graders(name: str, reward: RewardSection) -> Iterator[None]:
    """A pool of graders called `name`."""
    pool = GraderPool.start(name, workers=reward.workers, memory_bytes=reward.memory_bytes)
    try:
        yield
    finally:
        pool.close()


@contextmanager
def scratch(folder: RunFolder) -> Iterator[RunFolder]:
    """A folder for what is computed, on the file system that engines share, gone afterwards."""
    beside = Path(folder.workspace).parent
    beside.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".replay-{folder.run_id}-", dir=beside) as path:
        yield RunFolder(path, folder.run_id)


async def judge(
    stored: StoredStep,
    stages: tuple[Stage, ...],
    target: StepStore,
    trainer: TrainEngine | None,
    *,
    graders: str,
    tolerance: float,
) -> list[StageVerdict]:
    """Run a step's stages again and compare each with what is stored."""
    again = await run_again(stored, stages, target, graders=graders, trainer=trainer, chained=False)
    digest = await asyncio.to_thread(trainer.digest) if trainer else ""
    return stage_verdicts(stored, stages, again, digest, tolerance=tolerance)


@flow(name="replay", flow_run_name="replay {run}", retries=0)
@recorded
async def replay(
    run: str,
    root: str = "runs",
    steps: str = "",
    first: First = "score",
    tolerance: float | None = None,
    into: str = "",
    overrides: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Run stored steps again without a rollout engine, and say whether every output is what it was.

    Args:
        run: Name of the run.
        root: Folder of all runs.
        steps: Which finished steps, as a:b; all when empty.
        first: The stage to begin with; those after it follow. From generate on it has to be a new run.
        tolerance: How far a number may deviate; none on a CPU and 0.05 on GPUs unless given.
        into: Name of a new run that what is made is kept as; nothing is kept when empty.
        overrides: With into: what the new run has otherwise, as section.field=value.
    """
    root = absolute_root(root)
    folder = runs.run_folder(root, run)
    record = require_steps(folder)
    chosen = step_range(steps, len(manifest.finished_steps(folder)))
    check_kept(first, into, overrides)
    with joined_ray():
        allowed = tolerance if tolerance is not None else GPU_TOLERANCE * bool(gpus())
        if into:
            await keep(folder, root, chosen, first, into=into, overrides=overrides)
            compared = first != "generate" and not overrides
            return as_json(kept_verdict(folder, chosen, first, into, tolerance=allowed)) if compared else {"run": into}
        stages = stages_from(first, course_of(record))
        return as_json(await _judged(folder, record, chosen, stages, tolerance=allowed))


async def _judged(
    folder: RunFolder, record: RunRecord, chosen: range, stages: tuple[Stage, ...], *, tolerance: float
) -> ReplayVerdict:
    run = folder.run_id
    name = f"{run}-replay-{uuid.uuid4().hex[:8]}"
    found = ReplayVerdict(run, chosen.start, chosen.stop, tolerance)
    with ExitStack() as stack:
        if "score" in stages:
            stack.enter_context(graders(name, record.parameters.reward))
        target = stack.enter_context(scratch(folder))
        advance = stack.enter_context(progress_bar(f"replay {run}", len(chosen)))
        async with trainer_before(folder, record, chosen.start, name) as trainer:
            for step in chosen:
                stored, store = stored_step(folder, step), StepStore(target.step(step), run, step)
                found.stages.extend(await judge(stored, stages, store, trainer, graders=name, tolerance=tolerance))
                advance(worst(found.stages))
    return found
