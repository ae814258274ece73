"""An evaluation as it is worked on: on engines that hold the weights every set is scored, and the one step is closed.

What was committed is not made again: an evaluation that was stopped goes on with the same name.
"""

import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack

from prefect.runtime import flow_run

from milepost.engines.fleet import Fleet
from milepost.engines.protocols import WeightVersion
from milepost.flows.checkpoint import Weights
from milepost.flows.evaluation_request import EvaluationPlan
from milepost.flows.progress import Advance
from milepost.flows.services import running
from milepost.flows.start import Launched, require_model, store_prompts
from milepost.flows.tracker import open_tracker, tracking_uri
from milepost.storage import attempts, files, manifest, runs
from milepost.storage.eval_sets import set_rows
from milepost.storage.evaluated import Evaluated, evaluated
from milepost.storage.evaluation_link import evaluation_told
from milepost.storage.journal import Slot, StepStore
from milepost.storage.manifest import StepManifest
from milepost.storage.outbox import uid_of
from milepost.storage.provenance import provenance
from milepost.storage.runs import RunFolder, RunRecord
from milepost.storage.tables import TableRef, read_table
from milepost.tasks.eval_scores import SetScore
from milepost.tasks.evaluate import SetPlan, evaluate_set, set_plans


def evaluated_weights(weights: Weights) -> Evaluated:
    """What an evaluation remembers of what it is of."""
    if weights.run is None or weights.version is None:
        return Evaluated(weights.label, weights.model_dir, weights.run.run_id if weights.run else "")
    version = f"{weights.version.step}-{weights.version.digest}"
    home = weights.run
    return Evaluated(weights.label, home.checkpoint(weights.version.step), home.run_id, version, uid_of(home.outbox))


def open_evaluation(plan: EvaluationPlan, folder: RunFolder, *, fence: int) -> Launched:
    """Record the evaluation, or go on with the one of this name when it is of the same; ValueError when it is not."""
    if files.exists(folder.record):
        return Launched(plan.root, folder, require_same(plan, folder), fence)
    runs.require_new(folder)
    prompts = store_prompts(folder, plan.prompts, "eval")
    record = RunRecord(
        run_id=plan.run,
        steps=1,
        parameters=plan.parameters,
        parameters_digest=runs.parameters_digest(plan.parameters),
        provenance=provenance(),
        data={"prompts": prompts, "eval": None, **evaluated_weights(plan.weights).entry()},
        model={"path": plan.weights.model_dir, "folder": plan.weights.model_dir, "config": plan.model_config},
        started_at=time.time(),
    )
    runs.create(folder, record)
    return Launched(plan.root, folder, record, fence)


def require_same(plan: EvaluationPlan, folder: RunFolder) -> RunRecord:
    """The record of the evaluation that is there, of the same weights under the same parameters."""
    record = attempts.current(folder)
    before, now = evaluated(record), evaluated_weights(plan.weights)
    if before is None:
        raise ValueError(f"{folder.run_id!r} is a run and no evaluation: give the evaluation another name with --run")
    if (before.place, before.version) != (now.place, now.version):
        raise ValueError(
            f"evaluation {folder.run_id!r} is of {before.label}, not of {now.label}: give it another name with --run"
        )
    found = attempts.changes(record.parameters, plan.parameters)
    for key, (was, wanted) in found.items():
        if not key.startswith(("tracking.", "engines.")):
            raise ValueError(
                f"evaluation {folder.run_id!r} was begun with {key} {was!r}, now it is {wanted!r}: take it back, or "
                "give the evaluation another name with --run"
            )
    require_model(record)
    return record


def _plans(launched: Launched) -> list[SetPlan]:
    return set_plans(launched.parameters.eval.sets, launched.parameters, launched.record)


def shards_scored(launched: Launched) -> int:
    """How many of them are committed."""
    store = StepStore(launched.folder.step(0), launched.folder.run_id, 0)
    return sum(Slot.parse(commit.slot).stage == "score" for commit in store.commits())


Scoring = Callable[[], Awaitable[None]]
"""Scores every set of an evaluation and closes it."""


async def run_evaluation(launched: Launched, scoring: Scoring) -> StepManifest:
    """Score every set and close the evaluation; MLflow is told. One that is closed is left as it is."""
    uri = tracking_uri(launched.parameters.tracking, root=launched.root, running_url=running().mlflow_url)
    with ExitStack() as stack:
        tracker = stack.enter_context(open_tracker(launched, uri=uri, flow_run_id=str(flow_run.id or "")))
        if not manifest.finished_steps(launched.folder):
            await scoring()
            tracker.step(manifest.load(launched.folder, 0))
        if tracker.courier is not None:
            tracker.courier.post(evaluation_told(launched.folder))
    return manifest.load(launched.folder, 0)


def shard_count(launched: Launched) -> int:
    """How many shards the sets have, each of which is a line of progress."""
    table = read_table(TableRef(**launched.record.data["prompts"]))
    return sum(plan.shards(set_rows(table, plan.name).num_rows) for plan in _plans(launched))


async def score_all(
    launched: Launched,
    engines: Fleet,
    version: WeightVersion,
    *,
    advance: Advance = lambda text: None,
    graders: str = "",
) -> None:
    """Score every set on engines that hold `version`; `graders` names the run that has them if it is another one."""
    store = StepStore(launched.folder.step(0), launched.folder.run_id, 0, launched.fence)
    prompts = TableRef(**launched.record.data["prompts"])
    scores: list[SetScore] = [
        await evaluate_set(
            prompts,
            plan,
            weight_version=str(version),
            router_url=engines.router_url,
            store=store,
            advance=advance,
            graders=graders,
        )
        for plan in _plans(launched)
    ]
    close_evaluation(launched, store, version, scores)


def close_evaluation(launched: Launched, store: StepStore, version: WeightVersion, scores: list[SetScore]) -> None:
    """Publish the manifest: the evaluation is finished for ever."""
    named = f"{version.step}-{version.digest}"
    count = sum(score.prompts for score in scores)
    closed = StepManifest(
        run_id=store.run_id,
        step=store.step,
        previous="",
        version_in=named,
        version_out=named,
        checkpoint="",
        cursor={"epoch": 0, "position": 0, "served": count},
        commits=manifest.commit_entries(store.commits()),
        accounting={"evaluated": count, "served": count},
        metrics={name: value for score in scores for name, value in score.metrics().items()},
        fence=store.fence,
        attempt=1,
        parameters_digest=launched.record.parameters_digest,
    )
    manifest.publish(launched.folder, closed)
