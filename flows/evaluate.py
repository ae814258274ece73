"""The flow `evaluate`: weights scored on data sets, by engines of their own, and compared with others."""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

import pyarrow as pa
from prefect import flow
from prefect.states import Completed
from pydantic import Field

from milepost.flows.best import RemovedCheckpoint
from milepost.flows.checkpoint import Weights
from milepost.flows.claim import claimed
from milepost.flows.evaluation import open_evaluation, run_evaluation
from milepost.flows.evaluation_baseline import plan_baseline
from milepost.flows.evaluation_engines import on_own_engines
from milepost.flows.evaluation_report import write_evaluation_report
from milepost.flows.evaluation_request import EvaluationPlan, plan_evaluation
from milepost.flows.evaluation_results import compare as compare_with
from milepost.flows.evaluation_results import regressions, summary
from milepost.flows.outcome import recorded
from milepost.flows.progress import say
from milepost.flows.recipe import absolute_root
from milepost.flows.run_name import made_name
from milepost.flows.sharing import plan_shared, shared_evaluation
from milepost.flows.start import Launched
from milepost.storage import attempts, manifest, runs
from milepost.storage.evaluated import Gate, evaluated, gate_of, keep_gate
from milepost.storage.parameters import EvalSet, Parameters
from milepost.storage.runs import RunFolder
from milepost.storage.tables import TableRef, read_table
from milepost.storage.weight_version import WeightVersion

NO_GATE = Gate()


class Regressed(RuntimeError):
    """A score fell by more than it may. `found` is all that the evaluation came to."""

    def __init__(self, message: str, found: dict[str, Any]) -> None:
        super().__init__(message)
        self.found = found


def stored_weights(folder: RunFolder) -> Weights:
    """What an evaluation was begun with."""
    record = attempts.current(folder)
    of = evaluated(record)
    if of is None:
        raise ValueError(
            f"{folder.run_id!r} is a run and no evaluation: `milepost resume {folder.run_id}` goes on with it"
        )
    model_dir = str(record.model["folder"])
    if not of.version:
        return Weights(of.label, model_dir)
    home = of.place.rpartition("/checkpoints/")[0]
    return Weights(of.label, model_dir, RunFolder(home, of.run), WeightVersion.parse(of.version))


async def _work_on(folder: RunFolder, root: str, plan: EvaluationPlan | None, gate: Gate = NO_GATE) -> None:
    """Begin the evaluation, or go on with it, while this process alone holds it."""
    async with claimed(folder, root) as fence:
        if plan is None:
            weights = stored_weights(folder)
            launched = Launched(root, folder, attempts.current(folder), fence)
        else:
            weights = plan.weights
            launched = await asyncio.to_thread(open_evaluation, plan, folder, fence=fence)
        keep_gate(folder, gate)
        if manifest.finished_steps(folder):
            say(f"evaluation {folder.run_id} is finished: nothing is generated again")
        await run_evaluation(launched, partial(on_own_engines, launched, weights))


def _as_begun(folder: RunFolder) -> tuple[Parameters, pa.Table]:
    """The parameters and prompts of an evaluation that goes on."""
    record = attempts.current(folder)
    return record.parameters, read_table(TableRef(**record.data["prompts"]))


def _gate(folder: RunFolder, compare: str, max_drop: float | None, *, going_on: bool) -> Gate:
    """What is asked for now, and what was when the evaluation goes on."""
    before = gate_of(folder) if going_on else NO_GATE
    return Gate(compare or before.compare, before.max_drop if max_drop is None else max_drop)


def _skipped(error: RemovedCheckpoint) -> Any:
    """The state to end in, which Prefect takes in place of a result."""
    return Completed(name="Skipped", message=str(error))


@flow(name="evaluate", flow_run_name="evaluate {checkpoint} {run}", retries=0)
@recorded
async def evaluate(
    checkpoint: str,
    run: str = "",
    root: str = "runs",
    evals: Sequence[EvalSet] = (),
    compare: str = "",
    max_drop: Annotated[float, Field(ge=0)] | None = None,
    config: str = "",
    overrides: tuple[str, ...] = (),
    engines_of: str = "",
    skip_removed: bool = False,
) -> dict[str, Any]:
    """Score a checkpoint on held-out data sets, and fail when it is worse than another one by more than it may be.

    Args:
        checkpoint: A Hugging Face folder, a checkpoint's folder, RUN@STEP, RUN@latest, RUN@best or package:NAME; empty
            to go on with the evaluation called `run`.
        run: Name of the evaluation: a folder under root; made when empty.
        root: Folder of all runs.
        evals: Data sets, each with sampling and reward of its own; when empty those of the recipe or the checkpoint's
            run.
        compare: Another checkpoint, or the name of an earlier evaluation, to compare with prompt by prompt.
        max_drop: Fail when a mean score is lower than there by more than this, and the paired test gives p < 0.05.
        config: Recipe with what differs from the checkpoint's run.
        overrides: Values that differ, as section.field=value.
        engines_of: A run that trains now and is to evaluate its newest weights on its own engines, between two steps.
        skip_removed: End as skipped, instead of failing, when newer checkpoints have taken the place of this one.
    """
    root = absolute_root(root)
    run = run or made_name()
    folder = runs.run_folder(root, run)
    going_on = not (checkpoint or engines_of)
    plan = None
    try:
        if engines_of:
            plan = plan_shared(engines_of, checkpoint, run, root, sets=evals, config=config, overrides=overrides)
        elif checkpoint:
            plan = plan_evaluation(checkpoint, run, root, sets=evals, config=config, overrides=overrides)
        else:
            stored_weights(folder)  # refuses what is no evaluation, before anybody claims it
    except RemovedCheckpoint as error:
        if not skip_removed:
            raise
        return _skipped(error)
    gate, baseline = _gate(folder, compare, max_drop, going_on=going_on), None
    if gate.compare:
        like, prompts = (plan.parameters, plan.prompts) if plan else _as_begun(folder)
        how: dict[str, Any] = {"config": config, "overrides": overrides, "going_on": going_on}
        baseline = plan_baseline(gate.compare, run, root, like, prompts, **how)
        gate = Gate(baseline.name, gate.max_drop)
        if baseline.lacks:
            say(f"evaluation {baseline.name} has not, and is not compared on: {', '.join(baseline.lacks)}")
    if plan and engines_of:
        await shared_evaluation(plan)
        keep_gate(folder, gate)
    else:
        try:
            await _work_on(folder, root, plan, gate)
        except RemovedCheckpoint as error:
            if not skip_removed:
                raise
            return _skipped(error)
    if baseline and (baseline.plan or not manifest.finished_steps(baseline.folder)):
        await _work_on(baseline.folder, root, baseline.plan)
    compared = compare_with(folder, baseline.folder) if baseline else None
    write_evaluation_report(folder)
    found = summary(folder, compared)
    fallen = [] if gate.max_drop is None else regressions(found["compared"], gate.max_drop)
    if fallen:
        raise Regressed(f"{'; '.join(fallen)}: more than {gate.max_drop:g} may", found)
    return found
