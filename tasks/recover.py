"""From a run folder and fresh engines to where the run stands: the last checkpoint, and the stored batches since.

Nothing is generated, scored or filtered again: what the trainer lost is applied to it again from the tables it was
applied from, under the same keys.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from milepost.engines.protocols import TrainEngine, WeightVersion
from milepost.storage import checkpoints, manifest, purges, retention, runs, tables
from milepost.storage.checkpoints import CheckpointRef
from milepost.storage.journal import Commit, Slot, StepStore
from milepost.storage.parent import beside, parent_run, steps_before
from milepost.storage.prompt_order import Cursor
from milepost.storage.runs import RunFolder, RunRecord
from milepost.storage.tables import TableRef
from milepost.tasks.optimize import replay

Say = Callable[[str], None]


class RecoveryMismatch(RuntimeError):
    """The replayed trainer holds other weights than the run had."""


@dataclass(frozen=True)
class Standing:
    """Where a run goes on: the next step, its cursor, and the weights its manifest names (None before the first)."""

    step: int
    cursor: Cursor
    version: WeightVersion | None


def standing(folder: RunFolder) -> Standing:
    """What the manifests say; FileNotFoundError names one that is missing before the last."""
    finished = manifest.finished_steps(folder)
    step = len(finished)
    gaps = sorted({*range(step)} - {*finished})
    if gaps:
        raise FileNotFoundError(
            f"{folder.manifest(gaps[0])} is missing, and later steps are there: restore it from a copy"
        )
    if step == 0:
        return Standing(0, Cursor(), None)
    last = manifest.load(folder, step - 1)
    return Standing(step, Cursor(**last.cursor), WeightVersion.parse(last.version_out))


def optimized(store: StepStore) -> Commit:
    """What a finished step trained on."""
    commit = store.stored(Slot("optimize"))
    if commit is None:
        raise FileNotFoundError(f"{store.uri} is finished and has no optimize commit: restore it from a copy")
    return commit


def require_tables(folder: RunFolder, given: Sequence[TableRef], *, trained: bool = True) -> None:
    """DamagedTable or FileNotFoundError for the first table, of those given and those a resumption reads.

    Checkpoints are not hashed here: one that turns out to be damaged costs a look at the batches before it, by then
    with engines running. ValueError when one of those that it reads is not any more what was generated.
    """
    needed = needed_tables(folder, trained=trained)
    for ref in (*given, *needed):
        tables.require(ref)
    for ref in needed:
        if found := purges.of_table(ref.uri):
            raise ValueError(
                f"run {folder.run_id!r} cannot go on: prompts were purged on {found[0].date} from {ref.uri}, which it "
                "needs for that"
            )


def unsaved_steps(folder: RunFolder) -> range:
    """The steps whose batches a resumption applies again: those since the newest checkpoint that have trained."""
    step = standing(folder).step
    is_trained = StepStore(folder.step(step), folder.run_id, step).stored(Slot("optimize")) is not None
    return range(_saved(folder, step), step + is_trained)


def _saved(folder: RunFolder, step: int) -> int:
    """The newest checkpoint that a run which stands at `step` goes on from; 0 also where there is none."""
    return max((number for number in checkpoints.complete(folder, hashes=False) if number <= step), default=0)


def needed_tables(folder: RunFolder, *, trained: bool = True) -> list[TableRef]:
    """What a resumption reads: the batches since the newest checkpoint, and what the unfinished step has committed."""
    stands = standing(folder)
    stores = [StepStore(folder.step(step), folder.run_id, step) for step in range(stands.step + 1)]
    commits = [optimized(store) for store in stores[_saved(folder, stands.step) : stands.step]] if trained else []
    return [ref for commit in [*commits, *stores[-1].commits()] for ref in commit.tables.values()]


def replay_step(store: StepStore, trainer: TrainEngine) -> int:
    """Apply the stored batches of a step again, in their order and under their keys; how many there were."""
    purges.require_whole(store.uri)
    return replay(optimized(store), trainer)


def restore_before(folder: RunFolder, step: int, trainer: TrainEngine) -> tuple[CheckpointRef | None, int]:
    """Bring a fresh trainer to where it was before `step`; from which checkpoint, and by how many stored batches.

    DamagedCheckpoint where a run that began in the middle of another has none: batches alone would begin too early.
    """
    ref = checkpoints.latest(folder, at_most=step)
    if ref is not None:
        trainer.restore(ref)
    elif steps_before(parent_run(runs.load(folder))):
        raise checkpoints.damaged(folder.checkpoint(0), [f"run {folder.run_id!r} began with it and it is not whole"])
    steps = range(ref.version.step if ref else 0, step)
    replayed = sum(replay_step(StepStore(folder.step(earlier), folder.run_id, earlier), trainer) for earlier in steps)
    return ref, replayed


def begin_as_parent(folder: RunFolder, record: RunRecord, trainer: TrainEngine) -> None:
    """Where a run begins in the middle of another: what the trainer was then becomes its own checkpoint 0, for good.

    The middle may be the first step of a run that itself began so.
    """
    parent = parent_run(record)
    if parent is None or not steps_before(parent) or 0 in checkpoints.complete(folder, hashes=False):
        return
    restore_before(beside(folder, parent.run), parent.begin, trainer)
    trainer.weights(folder.weights(0), 0)  # which names them
    checkpoints.withdraw(folder, 0)
    checkpoints.publish(folder, trainer.save(folder.trainer_state(0)))
    retention.pin(folder, 0, "begin", f"the run begins as {parent.run} was before step {parent.begin}")


def recover_trainer(folder: RunFolder, trainer: TrainEngine, *, say: Say) -> Standing:
    """Bring a fresh trainer to where the run stands."""
    stands = standing(folder)
    ref, replayed = restore_before(folder, stands.step, trainer)
    begin = ref.version.step if ref else 0
    if stands.step:
        source = f"checkpoint {begin}" if ref else "the initial weights"
        say(f"run {folder.run_id} goes on at step {stands.step}: {source}, {replayed} stored batches applied again")
    return stands


def check_version(stands: Standing, found: WeightVersion) -> None:
    """RecoveryMismatch unless the trainer's exported weights are those the last manifest names."""
    if stands.version is not None and stands.version != found:
        raise RecoveryMismatch(
            f"after replay the weights are {found}, step {stands.step - 1} left {stands.version}: "
            "the stored batches or the machine's arithmetic differ, resume from a checkpoint saved at that step"
        )
