"""`milepost replay`: stages of finished steps run again from what is stored, and a verdict on every output.

No rollout engine is needed. The trainer starts from the checkpoint before the first step, with the batches stored since
applied once more, and what it computes is written beside the runs and thrown away.
"""

import asyncio
import math
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from prefect import flow

from milepost.engines.cluster import gpus
from milepost.engines.fleet import create_trainer
from milepost.engines.gpu_placement import reserved
from milepost.engines.graders import GraderPool
from milepost.engines.protocols import TrainEngine
from milepost.flows.loop import joined_ray
from milepost.flows.outcome import recorded
from milepost.flows.progress import progress_bar
from milepost.storage import attempts, checkpoints, manifest, runs
from milepost.storage.difference import Comparison
from milepost.storage.journal import Slot, StepStore
from milepost.storage.parameters import Parameters
from milepost.storage.runs import RunFolder, RunRecord
from milepost.tasks.recover import replay_step
from milepost.tasks.replay import Stage, StoredStep, compare_stage, compare_weights, run_again, stages_from

GPU_TOLERANCE = 0.05  # kernels add in another order each time; log-probabilities of bfloat16 move by about this


@dataclass(frozen=True)
class StageVerdict:
    """One stage of one step: the first difference, empty when there is none, and the largest deviation."""

    step: int
    stage: str
    difference: str
    deviation: float


@dataclass(frozen=True)
class ReplayVerdict:
    """A replay of steps `begin` to before `end`: what was found, stage by stage."""

    run: str
    begin: int
    end: int
    tolerance: float
    stages: list[StageVerdict] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        if any(stage.difference for stage in self.stages):
            return "different"
        return "within tolerance" if any(stage.deviation for stage in self.stages) else "identical"


def step_range(text: str, finished: int) -> range:
    """`a:b`, `a:`, `:b` or one number as steps of a run with `finished` ones; ValueError for what is not among them."""
    begin, colon, end = text.partition(":")
    try:
        first = int(begin or 0)
        last = int(end or finished) if colon or not text else first + 1
    except ValueError:
        raise ValueError(f"--steps {text!r} is no range: give a:b, such as 0:5, or one step") from None
    if not 0 <= first < last <= finished:
        raise ValueError(f"--steps {text!r} names no finished steps: the run has steps 0 to {finished - 1}")
    return range(first, last)


def stored_step(folder: RunFolder, step: int, parameters: Parameters | None = None) -> StoredStep:
    """A finished step with `parameters`, or else those of the attempt that made it."""
    store = StepStore(folder.step(step), folder.run_id, step)
    closed = manifest.load(folder, step)
    commits = {Slot.parse(commit.slot): commit for commit in store.commits()}
    return StoredStep(store, closed, commits, parameters or attempts.parameters_of(folder, closed.attempt))


@contextmanager
def _trainer_alone(name: str, parameters: Parameters, record: RunRecord) -> Iterator[TrainEngine]:
    """The trainer of a run, alone on its GPUs if there are any."""
    alone = parameters.model_copy(update={"engines": parameters.engines.model_copy(update={"rollout": "fake"})})
    with reserved(name, alone):
        trainer = create_trainer(name, alone, record.model["folder"])
        try:
            trainer.load()
            yield trainer
        finally:
            trainer.close()


@asynccontextmanager
async def trainer_before(
    folder: RunFolder, record: RunRecord, step: int, name: str, *, parameters: Parameters | None = None
) -> AsyncIterator[TrainEngine]:
    """The trainer as it was before `step`, for steps under `parameters` if other than the run's."""
    with _trainer_alone(name, parameters or record.parameters, record) as trainer:
        ref = checkpoints.latest(folder, at_most=step)
        if ref is not None:
            await asyncio.to_thread(trainer.restore, ref)
        for earlier in range(ref.version.step if ref else 0, step):
            await asyncio.to_thread(replay_step, StepStore(folder.step(earlier), folder.run_id, earlier), trainer)
        yield trainer


@contextmanager
def graders(name: str, workers: int) -> Iterator[None]:
    """A pool of graders called `name`."""
    pool = GraderPool.start(name, workers=workers)
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
    stored: StoredStep, first: Stage, target: StepStore, trainer: TrainEngine, *, graders: str, tolerance: float
) -> list[StageVerdict]:
    """Run a step's stages again and compare each with what is stored."""
    replayed = await run_again(stored, first, target, graders=graders, trainer=trainer, chained=False)
    found = {stage: compare_stage(stage, stored, replayed, tolerance=tolerance) for stage in stages_from(first)}
    digest = await asyncio.to_thread(trainer.digest)
    weights = compare_weights(stored, digest)
    if tolerance and weights.first:
        # Other in their last bits; the next step's log-probabilities tell how far.
        weights = Comparison(None, math.nextafter(0.0, 1.0))
    verdicts = [_verdict(stored, stage, comparison) for stage, comparison in found.items()]
    return [*verdicts, _verdict(stored, "weights", weights)]


def _verdict(stored: StoredStep, stage: str, found: Comparison) -> StageVerdict:
    return StageVerdict(stored.store.step, stage, str(found.first or ""), found.deviation)


@flow(name="replay", flow_run_name="replay {run}", retries=0)
@recorded
async def replay(
    run: str, root: str = "runs", steps: str = "", first: Stage = "score", tolerance: float | None = None
) -> dict[str, Any]:
    """Run stored steps again without a rollout engine, and say whether every output is what it was.

    Args:
        run: Name of the run.
        root: Folder of all runs.
        steps: Which finished steps, as a:b; all when empty.
        first: The stage to begin with; those after it follow.
        tolerance: How far a number may deviate; none on a CPU and 0.05 on GPUs unless given.
    """
    folder = runs.run_folder(root, run)
    record = attempts.current(folder)
    chosen = step_range(steps, len(manifest.finished_steps(folder)))
    name = f"{run}-replay-{uuid.uuid4().hex[:8]}"
    with ExitStack() as stack:
        stack.enter_context(joined_ray())
        allowed = tolerance if tolerance is not None else GPU_TOLERANCE * bool(gpus())
        found = ReplayVerdict(run, chosen.start, chosen.stop, allowed)
        if first == "score":
            stack.enter_context(graders(name, record.parameters.reward.workers))
        target = stack.enter_context(scratch(folder))
        advance = stack.enter_context(progress_bar(f"replay {run}", len(chosen)))
        async with trainer_before(folder, record, chosen.start, name) as trainer:
            for step in chosen:
                stored, store = stored_step(folder, step), StepStore(target.step(step), run, step)
                found.stages.extend(await judge(stored, first, store, trainer, graders=name, tolerance=allowed))
                advance(_worst(found.stages))
    return asdict(found) | {"verdict": found.verdict}


def _worst(stages: list[StageVerdict]) -> str:
    different = sum(bool(stage.difference) for stage in stages)
    return f"{different} different" if different else f"deviation {max(stage.deviation for stage in stages):.2g}"
