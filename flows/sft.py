"""The flow `sft`: supervised fine-tuning of a model on dialogues, or on prompts with their responses."""

import asyncio
from contextlib import ExitStack
from dataclasses import asdict
from typing import Annotated, Any

from prefect import flow
from prefect.runtime import flow_run
from pydantic import Field, PositiveInt

from milepost.engines.protocols import UpdateResult
from milepost.flows import crashed
from milepost.flows.claim import claimed, queued
from milepost.flows.fine_tune import fine_tune
from milepost.flows.outcome import recorded
from milepost.flows.own_thread import in_own_thread
from milepost.flows.progress import progress_bar, say
from milepost.flows.ray_cluster import joined_ray
from milepost.flows.recipe import absolute_root
from milepost.flows.report_delivery import report_at_end
from milepost.flows.run_logs import logged
from milepost.flows.run_name import made_name, shown_name
from milepost.flows.run_page import shown
from milepost.flows.services import running
from milepost.flows.sft_plan import SftRun, plan_sft
from milepost.flows.sft_run import close_learnt, open_sft
from milepost.flows.start import Launched
from milepost.flows.tracker import open_tracker, tracking_uri
from milepost.storage import runs
from milepost.storage.parameters import EnginesSection, ModelSection, TrackingSection
from milepost.storage.sft_rows import SftDataSection
from milepost.storage.tables import TableRef
from milepost.storage.taught import go_on_with, model_of
from milepost.storage.training import OptimizerSection, PerfSection

DEFAULT_LR = 1e-5


@flow(name="sft", flow_run_name=shown_name, retries=0, on_crashed=[crashed.end_below])
@recorded
async def sft(
    run: str = "",
    root: str = "runs",
    steps: PositiveInt | None = None,
    epochs: Annotated[float, Field(gt=0)] | None = None,
    data: SftDataSection = SftDataSection(),
    model: ModelSection = ModelSection(),
    optimizer: OptimizerSection = OptimizerSection(lr=DEFAULT_LR),
    perf: PerfSection = PerfSection(),
    engines: EnginesSection = EnginesSection(),
    tracking: TrackingSection = TrackingSection(),
) -> dict[str, Any]:
    """Teach a model answers that are there; returns what came of it, with the folder of the model to train or evaluate.

    Args:
        run: Name of the run; made when empty. One that was stopped goes on, when all else is as it was.
        root: Folder of all runs, a local one.
        steps: Optimizer steps, if not as many as `epochs` take.
        epochs: How often every row is learnt; once when neither is given.
        data: Which rows are learnt, and how many at a time.
        model: Which model, and how it is split over devices.
        optimizer: Adam and its schedule.
        perf: What fits in memory, and how fast it goes.
        engines: Which processes hold the model; those that generate are not started.
        tracking: Where lineage is indexed.
    """
    root = absolute_root(root)
    folder = runs.run_folder(root, run or made_name())
    wanted = await in_own_thread(
        plan_sft,
        folder,
        data=data,
        model=model,
        optimizer=optimizer,
        perf=perf,
        engines=engines,
        tracking=tracking,
        steps=steps,
        epochs=epochs,
    )
    if wanted.taught.too_long:
        say(f"{wanted.taught.too_long} of {wanted.taught.rows} rows do not fit model.context_length and are left out")
    async with claimed(folder, root, go_on_with=go_on_with(folder)) as fence:
        launched = await asyncio.to_thread(open_sft, wanted, root, fence=fence)
        return await _made(wanted, launched)


async def _made(wanted: SftRun, launched: Launched) -> dict[str, Any]:
    """Learn every batch and leave the model; what a run shows while it trains is shown of this too."""
    folder, shown_as = wanted.folder, str(flow_run.id or "")
    uri = tracking_uri(launched.parameters.tracking, root=launched.root, running_url=running().mlflow_url)
    with ExitStack() as stack:
        stack.enter_context(logged(folder, shown_as))
        tracker = stack.enter_context(open_tracker(launched, uri=uri, flow_run_id=shown_as))
        stack.callback(report_at_end, folder, tracker, shown_as)
        steps, go_on = wanted.plan.steps, go_on_with(folder)
        stack.enter_context(shown(folder, launched.root, steps=steps, flow_run_id=shown_as, go_on_with=go_on))
        stack.enter_context(joined_ray())

        def learnt(step: int, batch: TableRef, result: UpdateResult, *, started: float) -> None:
            tracker.step(close_learnt(launched, step, batch, result, started=started))

        done = await fine_tune(
            folder.run_id,
            folder.uri,
            wanted.examples,
            wanted.plan,
            parameters=wanted.parameters,
            model_dir=wanted.model_dir,
            advance=stack.enter_context(progress_bar(folder.run_id, wanted.plan.steps)),
            data=asdict(wanted.taught),
            learnt=learnt,
            waiting=queued(folder, launched.fence),
        )
    return {
        "run": folder.run_id,
        "model": model_of(folder),
        "rows": wanted.taught.rows,
        "too_long": wanted.taught.too_long,
        "steps": len(done.losses),
        "first_loss": done.losses[0],
        "last_loss": done.losses[-1],
        "losses": done.losses,
    }
