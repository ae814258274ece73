"""What lineage says of a run, as plain JSON: records that travel through the outbox and are read by storage/lineage.py.

Every record has `kind`, `id` (unique in its run), `run_id` and `time_ms`; the rest is in the function that builds it.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

from milepost.storage.outbox import Record
from milepost.storage.tables import TableRef

Status = Literal["FINISHED", "FAILED", "KILLED"]
Tags = Mapping[str, str | int | float]


def _record(kind: str, name: str, run_id: str, **content: Any) -> Record:
    return {"kind": kind, "id": name, "run_id": run_id, "time_ms": int(time.time() * 1000), **content}


def step_id(step: int) -> str:
    return f"step-{step:06d}"


def checkpoint_id(version: int) -> str:
    return f"checkpoint-{version:06d}"


def run_record(
    run_id: str,
    *,
    parameters: Mapping[str, Any],
    tags: Tags,
    parent_run: str = "",
    tables: Mapping[str, TableRef] | None = None,
    inputs: Mapping[str, Any] | None = None,
) -> Record:
    """A run begins: `parameters` as in `run.json`, `tags` such as its commit, `parent_run` the run it continues.

    `tables` are the prompts that it stored, by name, and `inputs` all that it began with, which is kept as a file.
    """
    return _record(
        "run",
        "run",
        run_id,
        parameters=dict(parameters),
        tags=_texts(tags),
        parent_run=parent_run,
        tables={name: asdict(ref) for name, ref in (tables or {}).items()},
        inputs=dict(inputs or {}),
    )


def resume_record(run_id: str) -> Record:
    """A run that had ended goes on."""
    return _record("resume", f"resume-{time.time_ns()}", run_id)


def attempt_record(run_id: str, attempt: int, changes: Mapping[str, Sequence[Any]], *, tags: Tags) -> Record:
    """A run goes on: `changes` maps `section.field` to its value before and after."""
    name = f"attempt-{attempt:06d}"
    return _record(
        "attempt", name, run_id, changes={key: list(pair) for key, pair in changes.items()}, tags=_texts(tags)
    )


def step_record(
    run_id: str, step: int, *, metrics: Mapping[str, float], tables: Mapping[str, TableRef], tags: Tags
) -> Record:
    """A step is done: its numbers, the tables it read and wrote by name, and `tags` such as weights version in and out.

    A metric that is not finite cannot be JSON, nor a point of a curve: its name goes to `nonfinite` with what it was.
    """
    finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
    nonfinite = {name: str(float(value)) for name, value in metrics.items() if name not in finite}
    refs = {name: asdict(ref) for name, ref in tables.items()}
    return _record(
        "step", step_id(step), run_id, step=step, metrics=finite, nonfinite=nonfinite, tables=refs, tags=_texts(tags)
    )


def checkpoint_record(
    run_id: str,
    version: int,
    *,
    uri: str,
    weights_version: str,
    step: int,
    parent: int | None = None,
    parent_uid: str = "",
    tables: Sequence[TableRef] = (),
) -> Record:
    """A checkpoint exists: trainer state after `version` trained steps, made by `step` from `tables`.

    `parent` is the version of the checkpoint before it in this run. A first one may come from a checkpoint of another
    run: `parent_uid` is the uid of its record.
    """
    return _record(
        "checkpoint",
        checkpoint_id(version),
        run_id,
        version=version,
        uri=uri,
        weights_version=weights_version,
        step=step,
        parent=parent,
        parent_uid=parent_uid,
        tables=[asdict(ref) for ref in tables],
    )


def evaluation_record(
    run_id: str,
    version: str,
    *,
    uid: str,
    sets: Mapping[str, tuple[TableRef, Mapping[str, float]]],
    label: str = "",
    run: str = "",
    uri: str = "",
) -> Record:
    """Weights of `version` were scored on `sets`, each with its prompts.

    `uid` is that of the record of their checkpoint. Weights without one are told by a `label`, and `run` and `uri`.
    """
    step = int(version.partition("-")[0])
    of = {"uid": uid, "label": label, "run": run, "uri": uri, "weights_version": version, "step": step}
    found = {name: {"table": asdict(table), "metrics": dict(metrics)} for name, (table, metrics) in sets.items()}
    return _record("evaluation", f"evaluation-{step:06d}", run_id, of=of, sets=found)


def end_record(run_id: str, status: Status, *, reason: str = "") -> Record:
    """A run ends, for now: it may be resumed and end again."""
    return _record("end", f"end-{time.time_ns()}", run_id, status=status, reason=reason)


def best_record(run_id: str, version: int, *, metric: str, value: float) -> Record:
    """The checkpoint of `version` is the best one by now."""
    return _record("best", f"best-{time.time_ns()}", run_id, version=version, metric=metric, value=value)


def report_record(run_id: str, uri: str) -> Record:
    """A report of the run was written to `uri`."""
    return _record("report", f"report-{time.time_ns()}", run_id, uri=uri)


def _texts(tags: Tags) -> dict[str, str]:
    return {name: str(value) for name, value in tags.items()}
