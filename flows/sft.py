"""The flow `sft`: supervised fine-tuning of a model on dialogues, or on prompts with their responses."""

import asyncio
from typing import Annotated, Any

from prefect import flow
from pydantic import Field, PositiveInt

from milepost.flows.fine_tune import fine_tune
from milepost.flows.loop import joined_ray
from milepost.flows.outcome import recorded
from milepost.flows.progress import progress_bar, say
from milepost.flows.recipe import absolute_root
from milepost.flows.run_name import made_name, shown_name
from milepost.flows.sft_plan import SftRun, plan_sft
from milepost.flows.staging import place, staging
from milepost.storage import files, runs
from milepost.storage.parameters import EnginesSection, ModelSection, OptimizerSection, PerfSection
from milepost.storage.sft_rows import SftDataSection

DEFAULT_LR = 1e-5


@flow(name="sft", flow_run_name=shown_name, retries=0)
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
) -> dict[str, Any]:
    """Teach a model answers that are there; returns what came of it, with the folder of the model to train or evaluate.

    Args:
        run: Name of what is made: a folder under root that must not be there; made when empty.
        root: Folder of all runs, a local one.
        steps: Optimizer steps, if not as many as `epochs` take.
        epochs: How often every row is learnt; once when neither is given.
        data: Which rows are learnt, and how many at a time.
        model: Which model, and how it is split over devices.
        optimizer: Adam and its schedule.
        perf: What fits in memory, and how fast it goes.
        engines: Which processes hold the model; those that generate are not started.
    """
    folder = runs.run_folder(absolute_root(root), run or made_name())
    wanted = await asyncio.to_thread(
        plan_sft,
        folder,
        data=data,
        model=model,
        optimizer=optimizer,
        perf=perf,
        engines=engines,
        steps=steps,
        epochs=epochs,
    )
    if wanted.data["too_long"]:
        say(f"{wanted.data['too_long']} of {wanted.data['rows']} rows do not fit model.context_length and are left out")
    return await _made(wanted)


async def _made(wanted: SftRun) -> dict[str, Any]:
    """Train in a folder that appears under its name when all of it is there."""
    folder = wanted.folder
    with joined_ray(), staging(folder, "sft") as staged, progress_bar(folder.run_id, wanted.plan.steps) as advance:
        done = await fine_tune(
            folder.run_id,
            staged.uri,
            wanted.examples,
            wanted.plan,
            parameters=wanted.parameters,
            model_dir=wanted.model_dir,
            advance=advance,
            data=wanted.data,
        )
        place(staged, folder)
    return {
        "run": folder.run_id,
        "model": files.join(folder.uri, "model"),
        "rows": wanted.data["rows"],
        "too_long": wanted.data["too_long"],
        "steps": len(done.losses),
        "first_loss": done.losses[0],
        "last_loss": done.losses[-1],
        "losses": done.losses,
    }
