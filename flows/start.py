"""How a run begins, and how one that is there goes on: both end in a `Launched` that the loop works on."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa

from milepost.engines.schedule import after_the_end, check_rates
from milepost.engines.tokenizer import load_tokenizer
from milepost.flows.algorithm_checks import check_algorithm
from milepost.flows.boundary import require_checkpoint
from milepost.flows.engine_checks import check_spare
from milepost.flows.other_models import as_recorded, check_others, other_models
from milepost.flows.parents import going_on
from milepost.flows.plan import RunPlan, check_steps, make_plan, model_folder, notices
from milepost.flows.planned_prompts import load_eval_prompts
from milepost.flows.progress import say
from milepost.flows.results import evaluations
from milepost.flows.stopped import stopped
from milepost.storage import attempts, files, manifest, redaction, runs
from milepost.storage.attempts import Changes
from milepost.storage.batch_plan import batch_plan, optimizer_steps
from milepost.storage.evaluated import evaluated
from milepost.storage.origin import origin_of
from milepost.storage.parameters import Parameters
from milepost.storage.parent import ParentRun, course_of, trained_steps
from milepost.storage.prompt_mixture import shares_entry
from milepost.storage.provenance import provenance
from milepost.storage.runs import RunFolder, RunRecord
from milepost.storage.schema import PROMPTS
from milepost.storage.tables import TableRef, write_table
from milepost.storage.taught import require_other
from milepost.storage.weight_version import WeightVersion
from milepost.tasks.recover import require_tables

FIXED = ("data.rollouts", "engines.train", "engines.rollout")


@dataclass(frozen=True)
class Launched:
    """A run that is recorded and held: everything the loop needs. `changes` is what this attempt changed."""

    root: str
    folder: RunFolder
    record: RunRecord
    fence: int = 0
    attempt: int = 1
    changes: Changes | None = None

    @cached_property
    def parameters(self) -> Parameters:
        """What to work with; those of the record are as they were given, and have references for secrets."""
        return self.record.parameters.resolved(going_on=True)

    @property
    def eval_prompts(self) -> TableRef | None:
        found = self.record.data["eval"]
        return TableRef(**found) if found else None

    @property
    def is_finished(self) -> bool:
        return is_finished(self.folder, self.record)


def is_finished(folder: RunFolder, record: RunRecord) -> bool:
    """Nothing is left to be done: it came to its last step, or a rule that still holds has stopped it."""
    return came_to_end(folder, record) or stopped(folder, record.parameters) is not None


def came_to_end(folder: RunFolder, record: RunRecord) -> bool:
    """Every step is closed, and the weights that the last one left are evaluated if they are to be."""
    done = len(manifest.finished_steps(folder))
    if done < record.steps or not record.data["eval"] or not record.parameters.eval.every_steps:
        return done >= record.steps
    left = WeightVersion.parse(manifest.load(folder, done - 1).version_out)
    return left.step in [item.step for item in evaluations(folder)]


def ended(launched: Launched) -> str:
    """What to say of a finished run that is to go on."""
    folder, record = launched.folder, launched.record
    stop = stopped(folder, record.parameters)
    if stop is None or came_to_end(folder, record):
        return f"run {folder.run_id} has finished its {record.steps} steps; give more with --steps"
    return (
        f"run {folder.run_id} was stopped after {stop.after} of {record.steps} steps by {stop.rule}: {stop.reason}; "
        f"it goes on when that no longer holds, as with `milepost resume {folder.run_id} --set {stop.rule}=...`"
    )


def store_prompts(folder: RunFolder, prompts: pa.Table, name: str) -> dict[str, Any]:
    """A reference to the stored table, for the data of a run's record."""
    return asdict(write_table(folder.prompts(name), prompts, PROMPTS))


def create_run(plan: RunPlan, folder: RunFolder, *, fence: int = 0) -> Launched:
    """Publish the run's prompts and then its `run.json`; a name that is taken is refused. `fence` is the caller's."""
    held_out = store_prompts(folder, plan.eval_prompts, "eval") if plan.eval_prompts is not None else None
    data = {
        "prompts": store_prompts(folder, plan.prompts.table, "train"),
        "eval": held_out,
        "too_long": plan.prompts.too_long,
        "bad_lines": plan.prompts.bad_lines,
        **shares_entry(plan.prompts.shares),
        **(plan.parent.entry() if plan.parent else {}),
    }
    trusted = plan.parameters.model.trust_remote_code
    record = RunRecord(
        run_id=plan.run,
        steps=plan.steps,
        parameters=plan.parameters,
        parameters_digest=runs.parameters_digest(plan.parameters),
        provenance=provenance(),
        data=data,
        model={
            "path": redaction.masked_text(plan.parameters.model.path),
            "folder": plan.model_dir,
            "config": plan.model_config,
            "tokenizer": load_tokenizer(plan.model_dir, trust_remote_code=trusted).digest,
            **as_recorded(plan.parameters, plan.others),
        },
        started_at=time.time(),
    )
    runs.create(folder, record)
    return Launched(plan.root, folder, record, fence)


def begin_run(
    root: str,
    folder: RunFolder,
    steps: int,
    parameters: Parameters,
    *,
    fence: int,
    parent: ParentRun | None = None,
) -> Launched:
    """Plan a new run, which may go on from a `parent`, and create it."""
    runs.require_new(folder)
    tell_of_masks(parameters)
    quarantine = files.join(folder.uri, "quarantine.jsonl")
    plan = make_plan(folder.run_id, root, steps, parameters, parent=parent, quarantine_uri=quarantine)
    for notice in notices(plan):
        say(notice)
    return create_run(plan, folder, fence=fence)


def reopen_run(
    root: str,
    folder: RunFolder,
    steps: int | None,
    parameters: Parameters | None,
    *,
    allowed: Sequence[str] = (),
    fence: int = 0,
) -> Launched:
    """Go on with a run; what is None stays as it was. A change that is not allowed is refused and nothing recorded."""
    before = require_resumable(folder, steps)
    chosen = going_on(parameters, before) if parameters else before.parameters
    require_allowed(before, chosen, allowed)
    require_checkpoint(folder, before, chosen)
    if came_to_end(folder, before) or stopped(folder, chosen):
        return Launched(root, folder, replace(before, parameters=chosen), fence, before.attempt)
    resolved = chosen.resolved(going_on=True)
    if course_of(before).trains:
        tell_of_rates(before, chosen)
        check_others(resolved, other_models(resolved, before.model), before.model["folder"])
    evaluation = _evaluation(folder, chosen, before)
    attempt = attempts.begin(folder, chosen, steps=before.steps, allowed=allowed, evaluation=evaluation)
    record = replace(attempts.current(folder), parameters=chosen)
    return Launched(root, folder, record, fence, attempt.number, attempt.changes)


def require_allowed(before: RunRecord, chosen: Parameters, allowed: Sequence[str]) -> None:
    """ValueError for a change that nobody allowed, or that would make another run of it."""
    found = attempts.changes(before.parameters, chosen)
    attempts.require_allowed(found, allowed)
    check_spare(chosen)
    if found:
        check_algorithm(chosen, batch_plan(chosen), course_of(before))
    if course_of(before).trains:
        check_rates(chosen)
    fixed = [key for key in FIXED if key in found and (key == "data.rollouts" or "none" in found[key])]
    if fixed:
        raise ValueError(f"{fixed[0]} decides which stages run {before.run_id!r} has: begin another run to change it")


def tell_of_masks(parameters: Parameters) -> None:
    """Say what of the parameters will be needed again when the run is to go on."""
    if found := parameters.literal_secrets():
        say(
            f"{', '.join(found)}: secrets are stored as {redaction.MASK}, so a resumption asks for them again; "
            "env:NAME as a value takes them from the environment each time"
        )


def tell_of_rates(record: RunRecord, parameters: Parameters) -> None:
    """Say so when a run that goes on has more steps than its learning rate was planned for."""
    if told := after_the_end(parameters.optimizer, optimizer_steps(parameters, trained_steps(record))):
        say(told)


def require_resumable(folder: RunFolder, steps: int | None) -> RunRecord:
    """The run as it was left, but up to `steps`, when all that going on will read is there and whole.

    This is for before anything is started; the first thing that is missing or damaged is named.
    """
    record = attempts.current(folder)
    require_other(folder.run_id, record)
    if evaluated(record):
        raise ValueError(
            f"{folder.run_id!r} is an evaluation and trains nothing: `milepost resume {folder.run_id}` goes on with "
            f"it, or the deployment `evaluate` with run {folder.run_id!r} and an empty checkpoint"
        )
    if origin := origin_of(record):
        raise ValueError(
            f"run {record.run_id!r} was imported from {origin.file} and has nothing to go on with: "
            f"train another run on it with --set data.rollouts={record.run_id}"
        )
    if steps is not None:
        check_steps(steps)
        record = replace(record, steps=steps)
    if not came_to_end(folder, record):
        require_model(record)
        stored = (record.data[name] for name in ("prompts", "eval"))
        require_tables(folder, [TableRef(**ref) for ref in stored if ref], trained=course_of(record).trains)
    return record


def require_model(record: RunRecord) -> None:
    """Make the model folder of a run again when it came from a package or a GGUF file and is gone; else it must be."""
    folder = record.model["folder"]
    if not Path(folder).is_dir() and model_folder(redaction.resolved(record.model["path"])) != folder:
        raise FileNotFoundError(f"the model folder {folder} of run {record.run_id!r} is gone: put it back")


def _evaluation(folder: RunFolder, parameters: Parameters, before: RunRecord) -> dict[str, Any] | None:
    """The stored evaluation prompts; those of other sets are read and stored first."""
    same = not {"eval.path", "eval.sets"} & attempts.changes(before.parameters, parameters).keys()
    if same and (before.data["eval"] or not parameters.eval.every_steps):
        stored: dict[str, Any] | None = before.data["eval"]
        return stored
    redaction.resolved({"eval": parameters.eval.model_dump()})
    found = load_eval_prompts(parameters.resolved(going_on=True), before.model["folder"])
    return store_prompts(folder, found, "eval") if found is not None else None
