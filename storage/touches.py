"""What a prompt or a sample has touched: every step that served or trained it, and every checkpoint made since.

This answers a request to take something down: what has to be looked at, in which runs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow.parquet as pq

from milepost.storage import checkpoints, files, manifest, runs
from milepost.storage.ancestry import exported_from, tables_of
from milepost.storage.runs import RunFolder

Kind = Literal["prompt", "sample"]


@dataclass(frozen=True)
class Touch:
    """One run that had it: the steps that served it and those whose optimizer batches hold it, and what came of those.

    `checkpoints` are the saved ones whose weights it is in; `inherited` says that the run began with such weights, from
    `parent`, and then every checkpoint of it counts.
    """

    run: str
    served: list[int]
    trained: list[int]
    samples: list[str]
    checkpoints: list[str]
    inherited: bool = False
    parent: str = ""


def run_folders(root: str) -> list[RunFolder]:
    """Every run in a root, by name."""
    found = (RunFolder(files.join(root, name), name) for name in files.names(root))
    return [folder for folder in found if files.exists(folder.record)]


def touches(root: str, kind: Kind, name: str) -> list[Touch]:
    """Every run of `root` that had the prompt or sample called `name`, or weights that it is in.

    LookupError when no run had it.
    """
    folders = run_folders(root)
    found = {folder.run_id: touch for folder in folders if (touch := _touch(folder, kind, name))}
    if not found:
        raise LookupError(f"no run in {root!r} has a {kind} {name!r}: give the id as the tables have it")
    for folder in _after_their_parents(folders):
        inherited = _inherited(folder, found)
        if inherited and folder.run_id not in found:
            found[folder.run_id] = inherited
    return list(found.values())


def _touch(folder: RunFolder, kind: Kind, name: str) -> Touch | None:
    served: list[int] = []
    trained: list[int] = []
    samples: dict[str, None] = {}
    for step in manifest.finished_steps(folder):
        closed = manifest.load(folder, step)
        had = [sample for ref in tables_of(closed, "filter") for sample in _samples(ref, kind, name)]
        if had:
            served.append(step)
            samples |= dict.fromkeys(had)
        if had and any(_samples(ref, kind, name) for ref in tables_of(closed, "optimize")):
            trained.append(step)
    if not served:
        return None
    after = [number for number in checkpoints.numbers(folder) if trained and number > trained[0]]
    return Touch(folder.run_id, served, trained, list(samples), [folder.checkpoint(number) for number in after])


def _samples(ref: dict[str, Any], kind: Kind, name: str) -> list[str]:
    fs, path = files.filesystem(ref["uri"])
    found = pq.read_table(path, columns=["sample_id"], filters=[(f"{kind}_id", "=", name)], filesystem=fs)
    samples: list[str] = found["sample_id"].to_pylist()
    return samples


def parent_of(folder: RunFolder) -> tuple[str, int] | None:
    """The run and version whose exported weights a run began with, if they were a run's."""
    made = exported_from(Path(runs.load(folder).model["folder"]))
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
    saved = [folder.checkpoint(number) for number in checkpoints.numbers(folder)]
    return Touch(folder.run_id, [], [], [], saved, inherited=True, parent=f"{parent}@{version}")
