"""Replays that are kept: a run of its own, which takes the stages before from the run that is replayed."""

from collections.abc import Sequence
from typing import Literal

from milepost.flows.plan import RunPlan, make_plan
from milepost.flows.recipe import parameters_of, with_overrides
from milepost.flows.replay_verdict import ReplayVerdict, stage_verdicts, stored_step
from milepost.flows.train import work_on
from milepost.storage import attempts, manifest, runs
from milepost.storage.parameters import Parameters
from milepost.storage.parent import ParentRun, course_of, parent_run, steps_before
from milepost.storage.runs import RunFolder
from milepost.storage.weight_version import WeightVersion
from milepost.tasks.replay import kept, stages_from

First = Literal["generate", "score", "filter", "optimize"]


def check_kept(first: First, into: str, overrides: Sequence[str]) -> None:
    """ValueError for what only a new run can be, without the name of one."""
    if into:
        return
    if first == "generate":
        raise ValueError("samples that are generated again are others: name a new run for them with --into")
    if overrides:
        raise ValueError(f"overrides {', '.join(overrides)} need the name of a new run as into; what-if only tells")


def kept_parameters(before: Parameters, run: str, first: First, overrides: Sequence[str]) -> Parameters:
    """Those of `run`, which had `before`, with `overrides`: samples that are generated again are not trained on."""
    content = before.model_dump()
    content["data"] |= {"rollouts": run, "path": "", "sets": []}
    content["eval"]["every_steps"] = 0
    if first == "generate":
        content["engines"]["train"] = "none"
    found = parameters_of(with_overrides(content, list(overrides)))
    if found.data.rollouts != run:
        raise ValueError(f"--set data.rollouts={found.data.rollouts} is another run than {run!r}, which is replayed")
    if first == "generate" and found.engines.train != "none":
        raise ValueError("a replay from generate trains nothing: train on what it makes with data.rollouts afterwards")
    if first == "optimize" and found.engines.train == "none":
        raise ValueError(f"run {run!r} trains nothing, so it has no optimize stage to replay")
    return found


def plan_kept(
    folder: RunFolder, root: str, steps: range, first: First, *, into: str, overrides: Sequence[str]
) -> RunPlan:
    """The run that steps of another are replayed into; what it cannot be is refused, and so is a name that is taken."""
    runs.require_new(runs.run_folder(root, into))
    before = attempts.parameters_of(folder, manifest.load(folder, steps.start).attempt)
    parameters = kept_parameters(before, folder.run_id, first, overrides)
    record = attempts.current(folder)
    earlier = steps_before(parent_run(record)) if course_of(record).trains else 0
    parent = ParentRun(folder.run_id, steps.start, first, earlier)
    return make_plan(into, root, len(steps), parameters, parent=parent)


async def keep(
    folder: RunFolder, root: str, steps: range, first: First, *, into: str, overrides: Sequence[str]
) -> None:
    """Run `steps` again from `first` on, as the run `into`; RunExists, and nothing done, when there is one."""
    plan = plan_kept(folder, root, steps, first, into=into, overrides=overrides)
    await work_on(runs.run_folder(root, into), root, plan.steps, plan.parameters, parent=plan.parent)


def kept_verdict(folder: RunFolder, steps: range, first: First, into: str, *, tolerance: float) -> ReplayVerdict:
    """The run `into` against the steps that it replays."""
    found = ReplayVerdict(folder.run_id, steps.start, steps.stop, tolerance)
    target = runs.run_folder(folder.uri.rstrip("/").rpartition("/")[0], into)
    stages = stages_from(first, course_of(attempts.current(target)))
    for own, step in enumerate(steps):
        stored, again = stored_step(folder, step), stored_step(target, own)
        digest = WeightVersion.parse(again.manifest.version_out).digest
        found.stages.extend(stage_verdicts(stored, stages, kept(again), digest, tolerance=tolerance))
    return found
