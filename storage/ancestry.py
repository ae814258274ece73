"""Where a checkpoint comes from, read from run folders alone: every step before it, and the runs before its run.

Tables are named with their digests and read in the columns that are asked for. One that is not as it was written is
refused in the words of `verify`, which alone looks into those that are only named.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import pyarrow as pa

from milepost.storage import attempts, files, manifest, runs
from milepost.storage.begun import Origin, begun_with, origin
from milepost.storage.journal import Slot, StepStore
from milepost.storage.manifest import StepManifest
from milepost.storage.origin import origin_of
from milepost.storage.parent import beside, parent_run, taken_from
from milepost.storage.provenance import Provenance
from milepost.storage.runs import RunFolder, RunRecord
from milepost.storage.step_tables import columns, tables_of
from milepost.storage.taught import row_of, taught, taught_by
from milepost.storage.weights_left import left_by

STEPS_AT_ONCE = 8
R = TypeVar("R")


@dataclass(frozen=True)
class TableLink:
    """A table that a step committed, under which name of which slot."""

    slot: str
    name: str
    uri: str
    rows: int
    digest: str


@dataclass(frozen=True)
class PromptLink:
    """A prompt that was served, or learnt: its content's hash, its data set and row there, and in which steps.

    The row is None where it is not known: for what was learnt before that was kept, or is purged.
    """

    prompt_id: str
    dataset: str
    row: int | None
    steps: list[int]


@dataclass(frozen=True)
class StepLink:
    """A step of the ancestry. `graders` are the rewards with the hash of their code, as its verdicts name them.

    `taken` is where its first stages come from: run, step and digest of its manifest; nothing when it made them itself.
    """

    step: int
    manifest: str
    version_in: str
    version_out: str
    attempt: int
    parameters_digest: str
    graders: list[str]
    tables: list[TableLink]
    taken: dict[str, Any]


@dataclass(frozen=True)
class AttemptLink:
    """Under what code, packages and configuration a part of the run was made, and what it changed."""

    number: int
    commit: str
    diff_digest: str
    packages_digest: str
    parameters_digest: str
    changes: dict[str, list[Any]]


@dataclass(frozen=True)
class Ancestry:
    """A checkpoint and all that is behind it. `state` says whether its files are there; `parent` is what came before.

    A parent is a checkpoint of another run, the record of supervised fine-tuning, or a model folder from elsewhere.
    `source` is the run whose stored stages it goes on from, up to the last step that it took; None for most.
    """

    run: str
    uri: str
    version: str
    state: str
    data: dict[str, Any]
    model: dict[str, Any]
    attempts: list[AttemptLink]
    steps: list[StepLink]
    prompts: list[PromptLink]
    parent: "Ancestry | Origin"
    source: "Ancestry | Origin | None" = None


def ancestry(folder: RunFolder, version: int) -> Ancestry:
    """The ancestry of the weights after `version` steps of a run; LookupError when it has not finished so many."""
    record = runs.load(folder)
    finished = manifest.finished_steps(folder)
    if not 0 < version <= len(finished):
        last = f"its last is {len(finished)}" if finished else "it has finished no step"
        raise LookupError(f"run {folder.run_id!r} has no checkpoint {version}: {last}")
    with ThreadPoolExecutor(STEPS_AT_ONCE) as pool:
        closed = list(pool.map(lambda step: manifest.load(folder, step), range(version)))
    left = left_by(folder, record, closed[-1])
    return Ancestry(
        run=folder.run_id,
        uri=left.uri,
        version=left.version,
        state=left.state,
        data=record.data,
        model=record.model,
        attempts=_attempts(folder, {step.attempt for step in closed}),
        steps=_of_each(closed, lambda step: step_link(folder, step)),
        prompts=_learnt(closed) if taught(record) else _prompts(closed),
        parent=_parent(folder, record),
        source=_source(folder, record, version),
    )


def _of_each(steps: Sequence[StepManifest], do: Callable[[StepManifest], R]) -> list[R]:
    """Side by side: reading a table leaves the interpreter free, and waits where the run is far away."""
    with ThreadPoolExecutor(STEPS_AT_ONCE) as pool:
        return list(pool.map(do, steps))


def step_link(folder: RunFolder, closed: StepManifest) -> StepLink:
    return StepLink(
        step=closed.step,
        manifest=manifest.manifest_digest(folder, closed.step),
        version_in=closed.version_in,
        version_out=closed.version_out,
        attempt=closed.attempt,
        parameters_digest=closed.parameters_digest,
        graders=_graders(closed),
        tables=[
            TableLink(entry["slot"], name, ref["uri"], ref["rows"], ref["digest"])
            for entry in closed.commits
            for name, ref in entry["tables"].items()
        ],
        taken=_taken(folder, closed.step),
    )


def _taken(folder: RunFolder, step: int) -> dict[str, Any]:
    sampled = StepStore(folder.step(step), folder.run_id, step).stored(Slot("sample"))
    found = taken_from(sampled.record) if sampled else None
    return {"run": found.run, "step": found.step, "manifest": found.manifest} if found else {}


def _graders(closed: StepManifest) -> list[str]:
    found: set[str] = set()
    for ref in tables_of(closed, "score"):
        verdicts = columns(ref, ["verdict"])["verdict"].drop_null()
        grader = pa.compute.extract_regex(verdicts, r'"grader":\s*"(?P<grader>(?:[^"\\]|\\.)*)"').combine_chunks()
        found |= {json.loads(f'"{name}"') for name in pa.compute.unique(grader.field("grader")).to_pylist() if name}
    return sorted(found)


def _prompts(closed: Sequence[StepManifest]) -> list[PromptLink]:
    """Every prompt that was served, in the order in which it first was."""
    found: dict[str, PromptLink] = {}
    for step, rows in zip(closed, _of_each(closed, _served), strict=True):
        for row in rows:
            found.setdefault(row["prompt_id"], PromptLink(**row, steps=[])).steps.append(step.step)
    return list(found.values())


def _served(closed: StepManifest) -> list[dict[str, Any]]:
    names = ["prompt_id", "dataset", "row"]
    return [row for ref in tables_of(closed, "sample") for row in columns(ref, names).to_pylist()]


def _learnt(closed: Sequence[StepManifest]) -> list[PromptLink]:
    """Every row that was learnt, in that order: rows may have one prompt and other responses."""
    found: dict[tuple[str, int | None], PromptLink] = {}
    for step, rows in zip(closed, _of_each(closed, _taught), strict=True):
        for prompt_id, dataset, row in dict.fromkeys(rows):
            found.setdefault((prompt_id, row), PromptLink(prompt_id, dataset, row, [])).steps.append(step.step)
    return list(found.values())


def _taught(closed: StepManifest) -> list[tuple[str, str, int | None]]:
    names = ["prompt_id", "dataset", "metadata"]
    rows = [row for ref in tables_of(closed, "optimize") for row in columns(ref, names).to_pylist()]
    return [(row["prompt_id"], row["dataset"], row_of(row["metadata"])) for row in rows]


def _attempts(folder: RunFolder, numbers: set[int]) -> list[AttemptLink]:
    """The attempts that made some of the steps; steps from before attempts were counted belong to the first."""
    wanted = {max(number, 1) for number in numbers}
    return [link for link in attempt_links(folder) if link.number in wanted]


def attempt_links(folder: RunFolder) -> Iterator[AttemptLink]:
    """Every attempt at a run, from the one that began it."""
    record = runs.load(folder)
    yield _attempt(1, record.provenance, record.parameters_digest, {})
    for attempt in attempts.attempts(folder):
        yield _attempt(attempt.number, attempt.provenance, attempts.digest(folder, attempt), attempt.changes)


def _attempt(number: int, made: Provenance, digest: str, changes: dict[str, list[Any]]) -> AttemptLink:
    return AttemptLink(number, made.commit, made.diff_digest, made.packages_digest, digest, changes)


def _parent(folder: RunFolder, record: RunRecord) -> Ancestry | Origin:
    """All of what the weights that a run began with come from; of a run that was imported, the file of its samples."""
    if imported := origin_of(record):
        return Origin("import", imported.file, asdict(imported))
    made = begun_with(folder, record)
    is_trained = made is not None and (made[1] > 0 or not files.exists(made[0].record))
    if made and is_trained:
        return _behind(*made)
    tuned = taught_by(record)
    return ancestry(*tuned) if tuned else origin(record.model["folder"])


def _source(folder: RunFolder, record: RunRecord, version: int) -> Ancestry | Origin | None:
    parent = parent_run(record)
    return _behind(beside(folder, parent.run), parent.begin + version) if parent else None


def _behind(folder: RunFolder, version: int) -> Ancestry | Origin:
    """The ancestry in another run, or only its name when that run is gone."""
    if files.exists(folder.record):
        return ancestry(folder, version)
    return Origin("run", folder.uri, {"run": folder.run_id, "version": version})
