"""What a run does not make itself: tables of another run's step, committed in its own journal before the step begins.

The stages they belong to find their result in the journal, and everything after them runs as in any other step.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict

import pyarrow as pa
from prefect import task
from prefect.cache_policies import NO_CACHE

from milepost.storage import manifest, purges
from milepost.storage.journal import Commit, Slot, StepStore
from milepost.storage.manifest import StepManifest
from milepost.storage.parent import TAKEN, Taken, taken_from
from milepost.storage.runs import RunFolder
from milepost.storage.schema import ROLLOUTS, SCHEMAS, schema_name
from milepost.storage.stages import Stage
from milepost.storage.tables import read_table, with_columns


def relabelled(table: pa.Table, run_id: str, step: int) -> pa.Table:
    """The table as one of step `step` of `run_id`. Samples and groups keep their ids, and prompts name no run."""
    if schema_name(table.schema) != schema_name(ROLLOUTS):
        return table
    return with_columns(table, {"run_id": [run_id] * table.num_rows, "step": [step] * table.num_rows})


def stored_stages(folder: RunFolder, step: int, stages: Sequence[Stage]) -> list[Commit]:
    """What a finished step committed for `stages`, in their order; ValueError for one it has nothing of."""
    purges.require_whole(folder.step(step))
    commits = StepStore(folder.step(step), folder.run_id, step).commits()
    found = {stage: [commit for commit in commits if Slot.parse(commit.slot).stage == stage] for stage in stages}
    lacking = [stage for stage in stages if not found[stage]]
    if lacking:
        raise ValueError(f"step {step} of run {folder.run_id!r} has no {lacking[0]} table to take")
    return [commit for stage in stages for commit in found[stage]]


@task(task_run_name="take-{store.step}", cache_policy=NO_CACHE)
def take_stages(folder: RunFolder, step: int, stages: tuple[Stage, ...], *, store: StepStore) -> list[Slot]:
    """Commit what step `step` of the run in `folder` made of `stages` as this step's own; the slots that are taken."""
    closed, digest = manifest.load(folder, step), manifest.manifest_digest(folder, step)
    commits = stored_stages(folder, step, stages)
    for commit in commits:
        _take(commit, closed, digest, store)
    return [Slot.parse(commit.slot) for commit in commits]


def _take(commit: Commit, closed: StepManifest, digest: str, store: StepStore) -> None:
    started = time.monotonic()
    slot, before = Slot.parse(commit.slot), taken_from(commit.record)
    taken = Taken(
        run=closed.run_id,
        step=closed.step,
        manifest=digest,
        version=before.version if before else closed.version_in,
        tables={name: ref.digest for name, ref in commit.tables.items()},
    )
    key = store.key(slot, list(commit.tables.values()), asdict(taken))
    if store.committed(slot, key) is not None:
        return
    tables = {}
    for name, ref in commit.tables.items():
        table = relabelled(read_table(ref), store.run_id, store.step)
        tables[name] = store.write(str(slot), table, SCHEMAS[ref.schema])
    store.commit(slot, key, tables, record=commit.record | {TAKEN: asdict(taken)}, started=started)
