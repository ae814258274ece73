"""How a run begins, and how one that is there goes on: both end in a `Launched` that the loop works on."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from milepost.flows.plan import RunPlan, check_steps, load_eval_prompts, make_plan, model_folder, notices
from milepost.flows.progress import say
from milepost.flows.results import evaluations
from milepost.storage import attempts, files, manifest, runs
from milepost.storage.attempts import Changes
from milepost.storage.parameters import Parameters
from milepost.storage.prompts import PromptSet
from milepost.storage.provenance import provenance
from milepost.storage.runs import RunFolder, RunRecord
from milepost.storage.schema import PROMPTS
from milepost.storage.tables import TableRef, write_table
from milepost.tasks.recover import require_tables


@dataclass(frozen=True)
class Launched:
    """A run that is recorded and held: everything the loop needs. `changes` is what this attempt changed."""

    root: str
    folder: RunFolder
    record: RunRecord
    fence: int = 0
    attempt: int = 1
    changes: Changes | None = None

    @property
    def parameters(self) -> Parameters:
        return self.record.parameters

    @property
    def eval_prompts(self) -> TableRef | None:
        found = self.record.data["eval"]
        return TableRef(**found) if found else None

    @property
    def is_finished(self) -> bool:
        return is_finished(self.folder, self.record)


def is_finished(folder: RunFolder, record: RunRecord) -> bool:
    """Every step is closed, and the weights that the last one left are evaluated if they are to be."""
    done = len(manifest.finished_steps(folder))
    evaluated = not record.data["eval"] or not record.parameters.eval.every_steps
    return done >= record.steps and (evaluated or done in [item.step for item in evaluations(folder)])


def _store_prompts(folder: RunFolder, prompts: PromptSet, name: str) -> dict[str, Any]:
    return asdict(write_table(folder.prompts(name), prompts.table, PROMPTS))


def create_run(plan: RunPlan, folder: RunFolder, *, fence: int = 0) -> Launched:
    """Publish the run's prompts and then its `run.json`; a name that is taken is refused. `fence` is the caller's."""
    held_out = _store_prompts(folder, plan.eval_prompts, "eval") if plan.eval_prompts else None
    data = {
        "prompts": _store_prompts(folder, plan.prompts, "train"),
        "eval": held_out,
        "too_long": plan.prompts.too_long,
        "bad_lines": plan.prompts.bad_lines,
    }
    record = RunRecord(
        run_id=plan.run,
        steps=plan.steps,
        parameters=plan.parameters,
        parameters_digest=runs.parameters_digest(plan.parameters),
        provenance=provenance(),
        data=data,
        model={"path": plan.parameters.model.path, "folder": plan.model_dir, "config": plan.model_config},
        started_at=time.time(),
    )
    runs.create(folder, record)
    return Launched(plan.root, folder, record, fence)


def begin_run(root: str, folder: RunFolder, steps: int, parameters: Parameters, *, fence: int) -> Launched:
    """Plan a new run and create it."""
    runs.require_new(folder)
    quarantine = files.join(folder.uri, "quarantine.jsonl")
    plan = make_plan(folder.run_id, root, steps, parameters, quarantine_uri=quarantine)
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
    chosen = parameters or before.parameters
    attempts.require_allowed(attempts.changes(before.parameters, chosen), allowed)
    if is_finished(folder, before):
        return Launched(root, folder, before, fence, before.attempt)
    evaluation = _evaluation(folder, chosen, before)
    attempt = attempts.begin(folder, chosen, steps=before.steps, allowed=allowed, evaluation=evaluation)
    return Launched(root, folder, attempts.current(folder), fence, attempt.number, attempt.changes)


def require_resumable(folder: RunFolder, steps: int | None) -> RunRecord:
    """The run as it was left, but up to `steps`, when all that going on will read is there and whole.

    This is for before anything is started; the first thing that is missing or damaged is named.
    """
    record = attempts.current(folder)
    if steps is not None:
        check_steps(steps)
        record = replace(record, steps=steps)
    if not is_finished(folder, record):
        require_model(record)
        stored = (record.data[name] for name in ("prompts", "eval"))
        require_tables(folder, [TableRef(**ref) for ref in stored if ref])
    return record


def require_model(record: RunRecord) -> None:
    """Make the model folder of a run again when it came from a package or a GGUF file and is gone; else it must be."""
    folder = record.model["folder"]
    if not Path(folder).is_dir() and model_folder(record.model["path"]) != folder:
        raise FileNotFoundError(f"the model folder {folder} of run {record.run_id!r} is gone: put it back")


def _evaluation(folder: RunFolder, parameters: Parameters, before: RunRecord) -> dict[str, Any] | None:
    """The stored evaluation prompts; those of another path are read and stored first."""
    same = parameters.eval.path == before.parameters.eval.path
    if same and (before.data["eval"] or not parameters.eval.every_steps):
        stored: dict[str, Any] | None = before.data["eval"]
        return stored
    found = load_eval_prompts(parameters, before.model["folder"])
    return _store_prompts(folder, found, "eval") if found else None
