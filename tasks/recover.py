"""From a run folder and fresh engines to where the run stands: the last checkpoint, and the stored batches since.

Nothing is generated, scored or filtered again: what the trainer lost is applied to it again from the tables it was
applied from, under the same keys.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from milepost.engines.protocols import TrainEngine, WeightVersion
from milepost.storage import checkpoints, manifest, tables
from milepost.storage.journal import Commit, Slot, StepStore
from milepost.storage.prompt_order import Cursor
from milepost.storage.runs import RunFolder
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


def require_tables(folder: RunFolder, given: Sequence[TableRef]) -> None:
    """DamagedTable or FileNotFoundError for the first table, of those given and those a resumption reads.

    It reads the batches since the newest checkpoint and what the unfinished step has committed. Checkpoints are not
    hashed here: one that turns out to be damaged costs a look at the batches before it, by then with engines running.
    """
    stands = standing(folder)
    saved = [number for number in checkpoints.complete(folder, hashes=False) if number <= stands.step]
    stores = [StepStore(folder.step(step), folder.run_id, step) for step in range(stands.step + 1)]
    commits = [optimized(store) for store in stores[max(saved, default=0) : stands.step]]
    for ref in (*given, *(ref for commit in [*commits, *stores[-1].commits()] for ref in commit.tables.values())):
        tables.require(ref)


def replay_step(store: StepStore, trainer: TrainEngine) -> int:
    """Apply the stored batches of a step again, in their order and under their keys; how many there were."""
    return replay(optimized(store), trainer)


def recover_trainer(folder: RunFolder, trainer: TrainEngine, *, say: Say) -> Standing:
    """Bring a fresh trainer to where the run stands."""
    stands = standing(folder)
    ref = checkpoints.latest(folder, at_most=stands.step)
    if ref is not None:
        trainer.restore(ref)
    begin = ref.version.step if ref else 0
    replayed = sum(
        replay_step(StepStore(folder.step(step), folder.run_id, step), trainer) for step in range(begin, stands.step)
    )
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
