"""A stored evaluation as a record: MLflow shows its scores with the checkpoint and the prompts that they are of."""

from collections.abc import Mapping

from milepost.storage import attempts, manifest
from milepost.storage.evaluated import evaluated
from milepost.storage.journal import Slot, StepStore
from milepost.storage.lineage_records import checkpoint_id, evaluation_record
from milepost.storage.outbox import Record, uid_of
from milepost.storage.runs import RunFolder
from milepost.storage.tables import TableRef

Sets = dict[str, tuple[TableRef, Mapping[str, float]]]


def scored_sets(store: StepStore, metrics: Mapping[str, float]) -> Sets:
    """The prompts of every set that was scored, and its part of the metrics."""
    commits = {Slot.parse(commit.slot): commit for commit in store.commits()}
    found: Sets = {}
    for slot, commit in commits.items():
        name = commit.record.get("name")
        if slot.stage == "evaluate" and name:
            own = {key: value for key, value in metrics.items() if key.startswith(f"eval/{name}/")}
            found[name] = (commits[Slot("sample", slot.round)].tables["prompts"], own)
    return found


def evaluation_told(folder: RunFolder) -> Record:
    """The record of a finished evaluation."""
    closed, of = manifest.load(folder, 0), evaluated(attempts.current(folder))
    assert of is not None
    step, _, digest = closed.version_in.partition("-")
    uid = f"{of.outbox}/{checkpoint_id(int(step))}" if of.outbox and of.version else f"weights/{digest}"
    sets = scored_sets(StepStore(folder.step(0), folder.run_id, 0), closed.metrics)
    return evaluation_record(
        folder.run_id, closed.version_in, uid=uid, sets=sets, label=of.label.partition("@")[0], run=of.run, uri=of.place
    )


def held_out_told(folder: RunFolder, store: StepStore, version: str, metrics: Mapping[str, float]) -> Record:
    """The record of an evaluation during a run, in `store`; the weights need not have a checkpoint."""
    uid = f"{uid_of(folder.outbox)}/{checkpoint_id(store.step)}"
    return evaluation_record(folder.run_id, version, uid=uid, sets=scored_sets(store, metrics))
