"""Attempts at a run: `run.json` says how it began, each resumption adds what it changed, and nothing is rewritten."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from milepost.storage import files, redaction, runs
from milepost.storage.parameters import Parameters
from milepost.storage.provenance import Provenance, provenance
from milepost.storage.runs import RunFolder, RunRecord

# What a resumed run may change without being told so: none of it changes what a step computes.
FREE_SECTIONS = ("tracking", "checkpoint", "eval", "stop", "alert", "check")

Changes = dict[str, list[Any]]


@dataclass(frozen=True)
class Attempt:
    """One resumption. `changes` maps `section.field` to its value before and after; `eval` is a TableRef or None."""

    number: int
    steps: int
    parameters: Parameters
    changes: Changes
    provenance: Provenance
    eval: dict[str, Any] | None
    started_at: float


def _folder(folder: RunFolder) -> str:
    return files.join(folder.uri, "attempts")


def _uri(folder: RunFolder, number: int) -> str:
    return files.join(_folder(folder), f"{number:06d}.json")


def attempts(folder: RunFolder) -> list[Attempt]:
    """Every resumption of a run, in order."""
    return [runs.read_record(files.join(_folder(folder), name), Attempt) for name in files.names(_folder(folder))]


def newest(folder: RunFolder) -> int:
    """The number of the last attempt, without reading it."""
    names = files.names(_folder(folder))
    return int(names[-1].removesuffix(".json")) if names else 1


def digest(folder: RunFolder, attempt: Attempt) -> str:
    """The digest of the parameters of an attempt in its own words: today's defaults have no say."""
    content = files.read_json(_uri(folder, attempt.number))["parameters"]
    return files.digest_of(files.canonical_json(content).encode())


def current(folder: RunFolder) -> RunRecord:
    """The record of a run as its last attempt left it; LookupError when there is no such run."""
    record = runs.load(folder)
    found = attempts(folder)
    if not found:
        return record
    last = found[-1]
    return replace(
        record,
        steps=last.steps,
        parameters=last.parameters,
        parameters_digest=runs.parameters_digest(last.parameters),
        data=record.data | ({"eval": runs.in_run(folder, last.eval)} if last.eval else {}),
        attempt=last.number,
        started_at=last.started_at,
    )


def parameters_of(folder: RunFolder, number: int) -> Parameters:
    """The parameters of attempt `number`; those of the first for a step from before attempts were counted."""
    given = {attempt.number: attempt.parameters for attempt in attempts(folder)}
    return given.get(number) or runs.load(folder).parameters


def all_parameters(folder: RunFolder) -> dict[int, Parameters]:
    """The parameters of every attempt, by its number."""
    return {1: parameters_of(folder, 1)} | {attempt.number: attempt.parameters for attempt in attempts(folder)}


def changes(before: Parameters, after: Parameters) -> Changes:
    """`section.field` of every value that differs, with both values. Another secret, or place of one, is no change."""
    old, new = (redaction.without_references(found.model_dump(mode="json")) for found in (before, after))
    return {
        f"{section}.{field}": [old[section][field], value]
        for section, fields in new.items()
        for field, value in fields.items()
        if old[section][field] != value
    }


def require_allowed(found: Changes, allowed: Sequence[str]) -> None:
    """ValueError names the first change that is neither free nor allowed, with both values and what to do."""
    for key, (before, after) in found.items():
        if key.split(".")[0] not in FREE_SECTIONS and key not in allowed:
            raise ValueError(
                f"{key} was {before!r} when the run began and is {after!r} now: "
                f"take it back, or say --allow-change {key} if the run may go on differently"
            )


def begin(
    folder: RunFolder,
    parameters: Parameters,
    *,
    steps: int,
    allowed: Sequence[str] = (),
    evaluation: dict[str, Any] | None = None,
) -> Attempt:
    """Record that the run goes on with `parameters`, up to `steps`; refused changes raise and record nothing."""
    before = current(folder)
    found = changes(before.parameters, parameters)
    require_allowed(found, allowed)
    if steps != before.steps:
        found["steps"] = [before.steps, steps]
    attempt = Attempt(before.attempt + 1, steps, parameters, found, provenance(), evaluation, time.time())
    content = asdict(attempt) | {"parameters": parameters.model_dump(mode="json")}
    files.publish_json(_uri(folder, attempt.number), {**runs.STAMP, **content})
    return attempt
