"""An evaluation on the engines of a run that trains: asked for through its folder, and waited for."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from milepost.flows.checkpoint import Weights
from milepost.flows.evaluation import shard_count
from milepost.flows.evaluation_request import EvaluationPlan, plan_of
from milepost.flows.failure import RunFailed
from milepost.flows.progress import progress_bar, say
from milepost.flows.run_status import resume_command
from milepost.flows.start import Launched
from milepost.storage import asked, attempts, files, lease, manifest, runs
from milepost.storage.evaluated import evaluated
from milepost.storage.journal import Slot, StepStore
from milepost.storage.parameters import EvalSet
from milepost.storage.parent import course_of
from milepost.storage.runs import RunFolder

WATCH_SECONDS = 0.5


def plan_shared(
    engines_of: str,
    checkpoint: str,
    run: str,
    root: str,
    *,
    sets: Sequence[EvalSet] = (),
    config: str = "",
    overrides: Sequence[str] = (),
    sampling: Mapping[str, Any] | None = None,
) -> EvaluationPlan:
    """What a run that works now is to be asked for; ValueError when it cannot do it, or works on nothing."""
    folder = runs.run_folder(root, engines_of)
    record = attempts.current(folder)
    latest = f"{engines_of}@latest"
    if checkpoint not in ("", latest):
        raise ValueError(
            f"{checkpoint!r} is not what the engines of {engines_of!r} have, which is the newest weights: "
            f"give {latest}, or leave --engines-of out"
        )
    if config or overrides:
        raise ValueError(
            f"the engines of {engines_of!r} are as they are: leave --config and --set out, or --engines-of"
        )
    if evaluated(record) or not course_of(record).makes("generate"):
        raise ValueError(f"run {engines_of!r} has no engines to share between its steps: leave --engines-of out")
    if not _is_at_work(folder) and not manifest.finished_steps(runs.run_folder(root, run)):
        raise ValueError(
            f"run {engines_of!r} is not running and has no engines to share: start it with "
            f"`{resume_command(folder, root)}`, or evaluate {latest} without --engines-of"
        )
    plan = plan_of(Weights(latest, str(record.model["folder"]), folder), run, root, sets=sets, sampling=sampling)
    if secrets := plan.parameters.literal_secrets():
        raise ValueError(f"{secrets[0]} is a secret, which is not stored for another process: give it as env:NAME")
    _require_same(plan, runs.run_folder(root, run))
    return plan


def _is_at_work(folder: RunFolder) -> bool:
    holder = lease.holder(folder.uri)
    return holder is not None and holder.works


def _require_same(plan: EvaluationPlan, folder: RunFolder) -> None:
    """ValueError when there is another run of this name."""
    if not files.exists(folder.record):
        return
    record = attempts.current(folder)
    of, given = evaluated(record), plan.weights.run
    assert given is not None
    if of is None or of.run != given.run_id or record.parameters.eval != plan.parameters.eval:
        raise ValueError(f"{folder.run_id!r} is there already and is something else: give the evaluation another name")


async def shared_evaluation(plan: EvaluationPlan) -> RunFolder:
    """Ask for it and wait until it is finished; RunFailed when it is refused, or the run ends before."""
    folder, sharing = runs.run_folder(plan.root, plan.run), plan.weights.run
    assert sharing is not None
    if not manifest.finished_steps(folder):
        await asyncio.to_thread(asked.ask, sharing, plan.run, plan.parameters, plan.prompts)
        say(f"run {sharing.run_id} evaluates {plan.run} when its step is done")
        await _wait(plan, folder, sharing)
    return folder


async def _wait(plan: EvaluationPlan, folder: RunFolder, sharing: RunFolder) -> None:
    while not files.exists(folder.record):
        await _look(plan, folder, sharing)
    launched = Launched(plan.root, folder, attempts.current(folder))
    store, done = StepStore(folder.step(0), folder.run_id, 0), 0
    with progress_bar(folder.run_id, await asyncio.to_thread(shard_count, launched)) as advance:
        while not manifest.finished_steps(folder):
            await _look(plan, folder, sharing)
            scored = [commit for commit in store.commits() if commit.slot.startswith("score-")]
            for commit in scored[done:]:
                advance(plan.parameters.eval.sets[Slot.parse(commit.slot).round].name)
            done = len(scored)


async def _look(plan: EvaluationPlan, folder: RunFolder, sharing: RunFolder) -> None:
    """Wait a moment; RunFailed when the evaluation will not come."""
    await asyncio.sleep(WATCH_SECONDS)
    if reason := asked.refused(sharing, plan.run):
        raise RunFailed(f"run {sharing.run_id!r} could not make evaluation {plan.run!r}: {reason}")
    if _is_at_work(sharing) or manifest.finished_steps(folder):
        return
    again = resume_command(sharing, plan.root)
    if files.exists(folder.record):
        raise RunFailed(f"run {sharing.run_id!r} ended during evaluation {plan.run!r}, and ends it after `{again}`")
    asked.settle(sharing, plan.run)
    raise RunFailed(
        f"run {sharing.run_id!r} ended before it came to evaluation {plan.run!r}: ask again after `{again}`, or leave "
        "--engines-of out"
    )
