"""The links of a stored run as records: MLflow is told what `milepost lineage` finds in the run folder.

Each is made of the same record of storage/ancestry.py that answers there, so that both know the same.
"""

from dataclasses import asdict, fields
from typing import Any

from milepost.storage import lineage_records as records
from milepost.storage import outbox, runs
from milepost.storage.ancestry import AttemptLink, StepLink, attempt_links, step_link
from milepost.storage.begun import begun_with, origin
from milepost.storage.files import canonical_json
from milepost.storage.manifest import StepManifest
from milepost.storage.outbox import Record
from milepost.storage.parent import PARENT
from milepost.storage.runs import RunFolder, RunRecord
from milepost.storage.tables import TableRef


def facts(link: StepLink | AttemptLink, *, without: tuple[str, ...]) -> dict[str, str]:
    """The fields of a link as tags: text as it is, anything else as JSON."""
    values = {item.name: getattr(link, item.name) for item in fields(link) if item.name not in without}
    return {name: value if isinstance(value, str) else canonical_json(value) for name, value in values.items()}


def inputs(began: RunRecord) -> dict[str, Any]:
    """What a run began with: its data, its model, and where the weights of that come from."""
    return {"data": began.data, "model": began.model, "weights": asdict(origin(began.model["folder"]))}


def run_began(folder: RunFolder, *, flow_run_id: str) -> Record:
    """The run as it began, by whatever process that is announced."""
    began, first = runs.load(folder), next(iter(attempt_links(folder)))
    given = inputs(began)
    weights = given["weights"]
    tags = facts(first, without=("number", "changes")) | {
        "run_id": folder.run_id,
        "uri": folder.uri,
        "flow_run_id": flow_run_id,
        "weights_from": weights["kind"],
        "weights_folder": weights["folder"],
    }
    if weights["kind"] == "run":
        tags["parent_version"] = str(weights["record"]["version"])
    return records.run_record(
        folder.run_id,
        parameters=began.parameters.model_dump(mode="json"),
        tags=tags,
        parent_run=began.data.get(PARENT, weights["record"]).get("run", ""),
        tables={name: TableRef(**ref) for name, ref in began.data.items() if isinstance(ref, dict) and "uri" in ref},
        inputs=given,
    )


def attempt_began(folder: RunFolder, number: int, *, flow_run_id: str) -> Record:
    """A resumption, with what it changed."""
    link = attempt_link(folder, number)
    tags = facts(link, without=("number", "changes")) | {"attempt": str(number), "flow_run_id": flow_run_id}
    return records.attempt_record(folder.run_id, number, link.changes, tags=tags)


def attempt_link(folder: RunFolder, number: int) -> AttemptLink:
    """The attempt with a number; 0, for a step from before they were counted, is the first."""
    return next(link for link in attempt_links(folder) if link.number == max(number, 1))


def step_closed(folder: RunFolder, closed: StepManifest, *, flow_run_id: str) -> Record:
    """A finished step with every table that it stored."""
    link = step_link(folder, closed)
    tags = facts(link, without=("step", "tables", "version_in", "version_out")) | {
        "weights_version_in": link.version_in,
        "weights_version_out": link.version_out,
        "commit": attempt_link(folder, closed.attempt).commit,
        "flow_run_id": flow_run_id,
    }
    return records.step_record(
        folder.run_id, closed.step, metrics=closed.metrics, tables=step_tables(closed), tags=tags
    )


def step_tables(closed: StepManifest) -> dict[str, TableRef]:
    """The tables of a step by the slot that committed them and their name there."""
    return {
        f"{entry['slot']}/{name}": TableRef(**ref) for entry in closed.commits for name, ref in entry["tables"].items()
    }


def checkpoint_saved(folder: RunFolder, closed: StepManifest, *, parent: int | None) -> Record:
    """The checkpoint that a step saved. `parent` is the one before it; the first descends from one of another run."""
    return records.checkpoint_record(
        folder.run_id,
        closed.step + 1,
        uri=closed.checkpoint,
        weights_version=closed.version_out,
        step=closed.step,
        parent=parent,
        parent_uid="" if parent else _uid_of_parent(folder),
        tables=list(step_tables(closed).values()),
    )


def _uid_of_parent(folder: RunFolder) -> str:
    """The uid of the record of the checkpoint whose weights a run began with; empty when they were no run's."""
    made = begun_with(folder, runs.load(folder))
    uid = outbox.uid_of(made[0].outbox) if made and made[1] else ""
    return f"{uid}/{records.checkpoint_id(made[1])}" if made and uid else ""
