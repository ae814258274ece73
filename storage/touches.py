"""What a prompt or a sample has touched: every step that served or trained it, and every checkpoint made since.

This answers a request to take something down: what has to be looked at, in which runs.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import pyarrow.compute as pc

from milepost.storage import checkpoints, manifest, purges, runs
from milepost.storage.begun import begun_with
from milepost.storage.parent import parent_run
from milepost.storage.registry import nearest
from milepost.storage.runs import RunFolder
from milepost.storage.step_tables import columns, sample_tables, tables_of
from milepost.storage.taught import came_of, model_of, taught, taught_by

Kind = Literal["prompt", "sample"]


@dataclass(frozen=True)
class Touch:
    """One run that had it: the steps that served it and those whose optimizer batches hold it, and what came of those.

    `checkpoints` are the saved ones whose weights it is in, of a fine-tuning its model; `inherited` says that the run
    began with such weights, from `parent`, and then every checkpoint of it counts.
    """

    run: str
    served: list[int]
    trained: list[int]
    samples: list[str]
    checkpoints: list[str]
    inherited: bool = False
    parent: str = ""
    purged: str = ""
    """The day on which what it says was taken out of the run, if it was."""


def touches(root: str, kind: Kind, name: str, *, run: str = "") -> list[Touch]:
    """Every run of `root` that had the prompt or sample called `name`, or weights that it is in.

    `run` leaves those aside that neither are this run nor have stages in common with it. LookupError when none had it.
    """
    folders = runs.run_folders(root)
    asked = _kin(folders, run) if run else folders
    found = {folder.run_id: touch for folder in asked if (touch := _touch(folder, kind, name))}
    if not found:
        where = f"run {run!r} has no" if run else f"no run in {root!r} has a"
        raise LookupError(f"{where} {kind} {name!r}{_instead(asked, kind, name)}")
    for folder in _after_their_parents(folders):
        inherited = _inherited(folder, found)
        if inherited:
            had = found.get(folder.run_id, inherited)
            found[folder.run_id] = replace(
                had, checkpoints=inherited.checkpoints, inherited=True, parent=inherited.parent
            )
    return list(found.values())


def _kin(folders: list[RunFolder], run: str) -> list[RunFolder]:
    """The run, those that it takes stored stages from, and those that take some from any of these."""
    parents = {folder.run_id: parent_run(runs.load(folder)) for folder in folders}
    pairs = [{name, parent.run} for name, parent in parents.items() if parent]
    kin = {run}
    while new := {name for pair in pairs if pair & kin for name in pair} - kin:
        kin |= new
    return [folder for folder in folders if folder.run_id in kin]


def _instead(folders: list[RunFolder], kind: Kind, name: str) -> str:
    """Which id may have been meant by one that no run has: one that begins so, or of the same step, or of all."""
    column = f"{kind}_id"
    known = {
        str(found)
        for folder in folders
        for step in manifest.finished_steps(folder)
        for ref in sample_tables(manifest.load(folder, step))
        for found in pc.unique(columns(ref, [column])[column]).to_pylist()
    }
    begun = sorted(found for found in known if found.startswith(name))
    if begun:
        return f", did you mean {begun[0]!r}?"
    same_step = [found for found in known if found.startswith(name.partition("-")[0])]
    return nearest(name, sorted(same_step or known)) or ": give the id as the tables have it"


def _touch(folder: RunFolder, kind: Kind, name: str) -> Touch | None:
    served: list[int] = []
    trained: list[int] = []
    samples: dict[str, str] = {}
    for step in manifest.finished_steps(folder):
        closed = manifest.load(folder, step)
        had = dict(pair for ref in sample_tables(closed) for pair in _samples(ref, kind, name))
        if had:
            served.append(step)
            samples |= had
        if had and any(_samples(ref, kind, name) for ref in tables_of(closed, "optimize")):
            trained.append(step)
    if not served:
        return None
    days = purges.purged_prompts(folder.uri)
    purged = min((days.get(prompt, "") for prompt in samples.values()), default="")
    saved = _saved(folder, trained[0]) if trained else []
    return Touch(folder.run_id, served, trained, list(samples), saved, purged=purged)


def _saved(folder: RunFolder, step: int = -1) -> list[str]:
    """What is saved of a run after `step`: checkpoints, or the model that a fine-tuning leaves."""
    saved = [folder.checkpoint(number) for number in checkpoints.numbers(folder) if number > step]
    return [model_of(folder)] if taught(runs.load(folder)) and came_of(folder) else saved


def _samples(ref: dict[str, Any], kind: Kind, name: str) -> list[tuple[str, str]]:
    """The samples that are meant, each with its prompt."""
    table = columns(ref, ["prompt_id", "sample_id"])
    found = table.filter(pc.equal(table[f"{kind}_id"], name))
    return list(zip(found["sample_id"].to_pylist(), found["prompt_id"].to_pylist(), strict=True))


def parent_of(folder: RunFolder) -> tuple[str, int] | None:
    """The run and version whose weights a run began with, if they were a run's."""
    record = runs.load(folder)
    made = begun_with(folder, record) or taught_by(record)
    return (made[0].run_id, made[1]) if made else None


def _after_their_parents(folders: list[RunFolder]) -> Iterator[RunFolder]:
    """The runs, each after the one that it began from, as far as they are among `folders`."""
    waiting = {folder.run_id: folder for folder in folders}
    while waiting:
        ready = [folder for folder in waiting.values() if (parent_of(folder) or ("", 0))[0] not in waiting]
        for folder in ready or list(waiting.values()):
            del waiting[folder.run_id]
            yield folder


def _inherited(folder: RunFolder, found: dict[str, Touch]) -> Touch | None:
    """What a run has of it by the weights that it began with."""
    parent, version = parent_of(folder) or ("", 0)
    before = found.get(parent)
    if before is None or not (before.inherited or any(step < version for step in before.trained)):
        return None
    return Touch(folder.run_id, [], [], [], _saved(folder), inherited=True, parent=f"{parent}@{version}")
