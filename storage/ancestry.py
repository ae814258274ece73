"""Where a checkpoint comes from, read from run folders alone: every step before it, and the runs before its run.

Tables are named with their digests and read in the columns that are asked for; that they hold what the digests say is
for `verify` to find out.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from milepost.storage import attempts, checkpoints, files, manifest, runs
from milepost.storage.journal import Slot
from milepost.storage.manifest import StepManifest
from milepost.storage.provenance import Provenance
from milepost.storage.runs import RunFolder

SFT_RECORD = "sft.json"
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
    """A prompt that was served: its content's hash, its data set and row there, and in which steps."""

    prompt_id: str
    dataset: str
    row: int
    steps: list[int]


@dataclass(frozen=True)
class StepLink:
    """A step of the ancestry. `graders` are the rewards with the hash of their code, as its verdicts name them."""

    step: int
    manifest: str
    version_in: str
    version_out: str
    attempt: int
    parameters_digest: str
    graders: list[str]
    tables: list[TableLink]


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


@dataclass(frozen=True)
class Origin:
    """Weights that no run made: `kind` is `sft` with its record, or `model` with the digest of its configuration."""

    kind: str
    folder: str
    record: dict[str, Any]


def exported_from(model_folder: Path) -> tuple[RunFolder, int] | None:
    """The run whose exported weights a model folder is, and after how many steps; None for one from elsewhere."""
    run = model_folder.parent.parent
    is_export = model_folder.parent.name == "weights" and model_folder.name.isdigit() and (run / "run.json").exists()
    return (RunFolder(str(run), run.name), int(model_folder.name)) if is_export else None


def columns(entry: dict[str, Any], names: Sequence[str]) -> pa.Table:
    """Some columns of a stored table, read without the rest of it."""
    fs, path = files.filesystem(entry["uri"])
    with fs.open(path, "rb") as file, pq.ParquetFile(file) as table:
        return table.read(columns=list(names), use_threads=False)


def tables_of(closed: StepManifest, stage: str) -> list[dict[str, Any]]:
    """The references of every table that a stage of a finished step committed."""
    return [
        ref for entry in closed.commits if Slot.parse(entry["slot"]).stage == stage for ref in entry["tables"].values()
    ]


def ancestry(folder: RunFolder, version: int) -> Ancestry:
    """The ancestry of the weights after `version` steps of a run; LookupError when it has not finished so many."""
    record = runs.load(folder)
    finished = manifest.finished_steps(folder)
    if not 0 < version <= len(finished):
        last = f"its last is {len(finished)}" if finished else "it has finished no step"
        raise LookupError(f"run {folder.run_id!r} has no checkpoint {version}: {last}")
    with ThreadPoolExecutor(STEPS_AT_ONCE) as pool:
        closed = list(pool.map(lambda step: manifest.load(folder, step), range(version)))
    return Ancestry(
        run=folder.run_id,
        uri=folder.checkpoint(version),
        version=closed[-1].version_out,
        state=_state(folder, closed[-1]),
        data=record.data,
        model=record.model,
        attempts=_attempts(folder, {step.attempt for step in closed}),
        steps=_of_each(closed, lambda step: _step(folder, step)),
        prompts=_prompts(closed),
        parent=_parent(record.model["folder"]),
    )


def _of_each(steps: Sequence[StepManifest], do: Callable[[StepManifest], R]) -> list[R]:
    """Side by side: reading a table leaves the interpreter free, and waits where the run is far away."""
    with ThreadPoolExecutor(STEPS_AT_ONCE) as pool:
        return list(pool.map(do, steps))


def _state(folder: RunFolder, last: StepManifest) -> str:
    if not last.checkpoint:
        return "not saved: checkpoint.every_steps left it out"
    wrong = checkpoints.faults(folder.checkpoint(last.step + 1), hashes=False)
    return "; ".join(wrong) if wrong else "complete"


def _step(folder: RunFolder, closed: StepManifest) -> StepLink:
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
    )


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


def _attempts(folder: RunFolder, numbers: set[int]) -> list[AttemptLink]:
    """The attempts that made some of the steps; steps from before attempts were counted belong to the first."""
    wanted = {max(number, 1) for number in numbers}
    return [link for link in _all_attempts(folder) if link.number in wanted]


def _all_attempts(folder: RunFolder) -> Iterator[AttemptLink]:
    record = runs.load(folder)
    yield _attempt(1, record.provenance, record.parameters_digest, {})
    for attempt in attempts.attempts(folder):
        yield _attempt(attempt.number, attempt.provenance, attempts.digest(folder, attempt), attempt.changes)


def _attempt(number: int, made: Provenance, digest: str, changes: dict[str, list[Any]]) -> AttemptLink:
    return AttemptLink(number, made.commit, made.diff_digest, made.packages_digest, digest, changes)


def _parent(model_folder: str) -> Ancestry | Origin:
    """What the weights in a model folder come from."""
    path = Path(model_folder)
    made = exported_from(path)
    if made and made[1]:
        return ancestry(*made)
    if (record := path.parent / SFT_RECORD).exists():
        return Origin("sft", model_folder, files.read_json(str(record)))
    config = path / "config.json"
    digest = files.digest_of(config.read_bytes()) if config.exists() else ""
    return Origin("model", model_folder, {"config_digest": digest})
