"""A supervised fine-tuning as a run: recorded, and a step closed for each batch that was learnt.

The trainer's state is not saved on the way. One that was stopped begins again at its first batch, and comes to the same
steps; what is stored of them is not written twice.
"""

import time
from dataclasses import asdict

from milepost.engines.protocols import UpdateResult
from milepost.flows.sft_plan import SftRun
from milepost.flows.start import Launched
from milepost.storage import attempts, files, manifest, runs
from milepost.storage.journal import Slot, StepStore
from milepost.storage.manifest import StepManifest
from milepost.storage.provenance import provenance
from milepost.storage.runs import RunRecord
from milepost.storage.tables import TableRef
from milepost.storage.taught import taught
from milepost.tasks.steps import stage_seconds, update_metrics


def open_sft(wanted: SftRun, root: str, *, fence: int) -> Launched:
    """Record the fine-tuning, or go on with the one of this name when it is the same; ValueError when it is not."""
    folder = wanted.folder
    if begun := require_same(wanted):
        return Launched(root, folder, begun, fence)
    runs.require_new(folder)
    record = RunRecord(
        run_id=folder.run_id,
        steps=wanted.plan.steps,
        parameters=wanted.given,
        parameters_digest=runs.parameters_digest(wanted.given),
        provenance=provenance(),
        data={"prompts": None, "eval": None, **wanted.taught.entry()},
        model={"path": wanted.given.model.path, "folder": wanted.model_dir, "config": wanted.model_config},
        started_at=time.time(),
    )
    runs.create(folder, record)
    return Launched(root, folder, record, fence)


def require_same(wanted: SftRun) -> RunRecord | None:
    """The record of a fine-tuning that was begun under this name, which learns the same in the same way."""
    if not files.exists(wanted.folder.record):
        return None
    record = runs.load(wanted.folder)
    changes = attempts.changes(record.parameters, wanted.given)
    before, now = _learns(record), asdict(wanted.taught) | {"steps": wanted.plan.steps}
    changes |= {key: [before.get(key), value] for key, value in now.items() if before.get(key) != value}
    for key, (was, is_now) in changes.items():
        if not key.startswith(("tracking.", "engines.")):
            raise ValueError(
                f"fine-tuning {record.run_id!r} was begun with {key} {was!r}, now it is {is_now!r}: take it back, or "
                "give another name with --run"
            )
    return record


def _learns(record: RunRecord) -> dict[str, object]:
    found = taught(record)
    return {**(asdict(found) if found else {}), "steps": record.steps}


def close_learnt(
    launched: Launched, step: int, batch: TableRef, result: UpdateResult, *, started: float
) -> StepManifest:
    """Commit the batch that a step has learnt, and close the step, which names no weights: they are not kept."""
    folder = launched.folder
    store = StepStore(folder.step(step), folder.run_id, step, launched.fence)
    slot = Slot("optimize")
    record = {"results": [asdict(result)]}
    store.commit(slot, store.key(slot, [batch], {}), {"batch": batch}, record=record, started=started)
    closed = StepManifest(
        run_id=folder.run_id,
        step=step,
        previous=manifest.manifest_digest(folder, step - 1),
        version_in="",
        version_out="",
        checkpoint="",
        cursor={},
        commits=manifest.commit_entries(store.commits()),
        accounting={},
        metrics=update_metrics([result]) | stage_seconds(store),
        fence=store.fence,
        attempt=1,
        parameters_digest=launched.record.parameters_digest,
    )
    manifest.publish(folder, closed)
    return closed
