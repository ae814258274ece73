"""A checkpoint is trusted once its manifest is there and every file is what the manifest says."""

import logging
from pathlib import Path
from typing import Any

import pytest

from milepost.engines.fake_rank import FakeRank
from milepost.engines.protocols import UpdateParams
from milepost.flows.best import saved_step
from milepost.storage import checkpoints, files, retention
from milepost.storage.checkpoints import CheckpointRef, DamagedCheckpoint
from milepost.storage.runs import RunFolder
from milepost.storage.schema import ROLLOUTS, from_rows
from milepost.storage.tables import TableRef, write_table
from milepost.storage.weight_version import WeightVersion
from milepost.tasks.sync import save_checkpoint

from .test_tables import rollout

STATE = b"optimizer moments" * 1000


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(str(tmp_path / "run"), "run")


def version(number: int) -> WeightVersion:
    return WeightVersion(number, f"{number:064x}")


def write(folder: RunFolder, number: int) -> CheckpointRef:
    """What an engine leaves: files, hidden and nested ones too, and no manifest."""
    uri = folder.trainer_state(number)
    for name in ("state", ".metadata", "ranks/0"):
        files.publish(files.join(uri, name), STATE + f"{name}{number}".encode(), overwrite=True)
    return CheckpointRef(uri, version(number), f"key-{number}", {"tensor_parallel": 2})


def publish(folder: RunFolder, *chosen: int) -> None:
    for number in chosen:
        checkpoints.publish(folder, write(folder, number))


def path(folder: RunFolder, number: int, name: str) -> Path:
    return Path(folder.checkpoint(number), name)


def truncate(folder: RunFolder, number: int) -> str:
    target = path(folder, number, "state")
    target.write_bytes(target.read_bytes()[:-7])
    return f"state has {target.stat().st_size} bytes instead of {target.stat().st_size + 7}"


def flip(folder: RunFolder, number: int) -> str:
    data = bytearray(path(folder, number, ".metadata").read_bytes())
    data[100] ^= 1
    path(folder, number, ".metadata").write_bytes(data)
    return ".metadata has changed since it was saved"


def lose(folder: RunFolder, number: int) -> str:
    path(folder, number, "ranks/0").unlink()
    return "ranks/0 is missing"


def half_write(folder: RunFolder, number: int) -> str:
    path(folder, number, "checkpoint.json").rename(path(folder, number, ".checkpoint.json.1234.tmp"))
    return "it has no checkpoint.json, so it was never completed"


def edit(folder: RunFolder, number: int) -> str:
    target = path(folder, number, "checkpoint.json")
    target.write_text(target.read_text().replace(f"key-{number}", "key-9"))
    return "checkpoint.json has changed since it was published"


def cut_manifest(folder: RunFolder, number: int) -> str:
    target = path(folder, number, "checkpoint.json")
    target.write_text(target.read_text()[:50])
    return "checkpoint.json is not JSON"


def misplace(folder: RunFolder, number: int) -> str:
    path(folder, number, "").rename(folder.checkpoint(number + 1))
    return f"it is version {version(number)} of run 'run'"


DAMAGES = [truncate, flip, lose, half_write, edit, cut_manifest, misplace]


def test_the_latest_is_the_newest_and_carries_what_was_saved(folder: RunFolder) -> None:
    assert checkpoints.latest(folder) is None
    publish(folder, 2, 10)
    assert checkpoints.latest(folder) == write_free_reference(folder, 10)
    assert checkpoints.latest(folder, at_most=9) == write_free_reference(folder, 2)
    assert checkpoints.latest(folder, at_most=1) is None
    assert checkpoints.complete(folder) == [2, 10]


def write_free_reference(folder: RunFolder, number: int) -> CheckpointRef:
    return CheckpointRef(folder.trainer_state(number), version(number), f"key-{number}", {"tensor_parallel": 2})


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_checkpoint_is_passed_over_and_the_warning_says_why(
    damage: Any, folder: RunFolder, caplog: pytest.LogCaptureFixture
) -> None:
    publish(folder, 1, 2)
    wrong = damage(folder, 2)
    with caplog.at_level(logging.WARNING):
        assert checkpoints.latest(folder) == write_free_reference(folder, 1)
    assert len(caplog.messages) == 1 and wrong in caplog.messages[0]
    assert checkpoints.complete(folder) == [1]


def test_every_fault_is_named(folder: RunFolder) -> None:
    publish(folder, 1)
    wrong = sorted([truncate(folder, 1), flip(folder, 1), lose(folder, 1)])
    assert checkpoints.faults(folder.checkpoint(1)) == wrong
    with pytest.raises(DamagedCheckpoint, match="cannot be used: .metadata has changed .*: restore it from a copy"):
        checkpoints.require_complete(folder.checkpoint(1))


def test_an_engine_that_saved_has_made_no_checkpoint_yet(folder: RunFolder) -> None:
    write(folder, 1)
    assert checkpoints.latest(folder) is None
    with pytest.raises(DamagedCheckpoint, match="it has no checkpoint.json, so it was never completed"):
        checkpoints.require_complete(folder.checkpoint(1))


def test_a_run_that_was_moved_keeps_its_checkpoints(folder: RunFolder, tmp_path: Path) -> None:
    publish(folder, 1)
    moved = RunFolder(str(tmp_path / "elsewhere"), "run")
    Path(folder.uri).rename(moved.uri)
    assert checkpoints.latest(moved) == write_free_reference(moved, 1)


def test_a_published_checkpoint_is_not_published_again_and_belongs_in_its_place(folder: RunFolder) -> None:
    publish(folder, 1)
    with pytest.raises(files.AlreadyPublished):
        checkpoints.publish(folder, write_free_reference(folder, 1))
    with pytest.raises(ValueError, match="belongs at '.*000003'"):
        checkpoints.publish(folder, CheckpointRef(folder.checkpoint(1), version(3), ""))
    with pytest.raises(DamagedCheckpoint, match="has no files"):
        checkpoints.publish(folder, write_free_reference(folder, 3))


def test_checkpoints_live_on_any_filesystem() -> None:
    folder = RunFolder("memory://checkpoints/run", "run")
    publish(folder, 1, 2)
    checkpoints.withdraw(folder, 2)
    assert checkpoints.latest(folder) == write_free_reference(folder, 1)
    assert retention.retain(folder, keep_last=1) == []


def test_retention_keeps_the_newest_every_mth_and_the_pinned(folder: RunFolder) -> None:
    publish(folder, *range(1, 9))
    retention.pin(folder, 2, "eval", "best held-out accuracy")
    assert retention.retain(folder, keep_last=2, keep_every=3, also={4}) == [1, 5]
    assert checkpoints.complete(folder) == [2, 3, 4, 6, 7, 8]
    assert retention.removed(folder) == {1, 5}
    assert retention.retain(folder, keep_last=1) == [3, 4, 6, 7]
    retention.unpin(folder, 2, "eval")
    assert retention.retain(folder, keep_last=1) == [2]
    assert not Path(folder.uri, "checkpoints", "pins", "000002").exists()


def test_whoever_asks_for_a_checkpoint_that_retention_removed_is_told_so(folder: RunFolder) -> None:
    publish(folder, 1, 2, 3)
    retention.retain(folder, keep_last=1)
    gone = r"no checkpoint of step 2 any more, newer ones took its place \(checkpoint.keep_last, .*\): there are 0, 3"
    with pytest.raises(LookupError, match=gone):
        saved_step(folder, "2", [3])
    with pytest.raises(LookupError, match="no checkpoint of step 4: there are 0, 3"):
        saved_step(folder, "4", [3])


def test_retention_counts_only_what_is_complete(folder: RunFolder) -> None:
    publish(folder, 1, 2, 3)
    truncate(folder, 3)
    assert retention.retain(folder, keep_last=1) == [1]
    assert checkpoints.complete(folder) == [2] and checkpoints.numbers(folder) == [2, 3]


def test_left_overs_of_killed_saves_and_removals_go(folder: RunFolder) -> None:
    publish(folder, 1, 2, 3)
    checkpoints.withdraw(folder, 1)
    path(folder, 1, "state").unlink()
    temporary = Path(folder.uri, "checkpoints", ".000002.00ff.tmp")
    temporary.mkdir()
    (temporary / "state").write_bytes(b"half")
    assert checkpoints.complete(folder) == [2, 3]
    assert retention.retain(folder, keep_last=5, keep_every=1) == [1]
    assert not temporary.exists() and checkpoints.complete(folder) == [2, 3]


def test_a_pin_is_for_a_checkpoint_that_is_there(folder: RunFolder) -> None:
    publish(folder, 1)
    with pytest.raises(LookupError, match="'run' has no checkpoint of version 2, complete are: 1"):
        retention.pin(folder, 2, "eval", "best")
    with pytest.raises(ValueError, match="pin '../eval' cannot name a file"):
        retention.pin(folder, 1, "../eval", "best")


def batch(folder: RunFolder, sample: str) -> TableRef:
    return write_table(f"{folder.uri}/batches/{sample}", from_rows([rollout(sample)], ROLLOUTS), ROLLOUTS)


def test_a_fake_trainer_restores_what_it_had_and_forgets_what_came_after(folder: RunFolder) -> None:
    rank, update = FakeRank(0, 1, None), UpdateParams("ppo_clip")
    for key in ("a", "b"):
        rank.step(batch(folder, key), update, key)
    pushed = rank.weights(folder.weights(1), 1).version
    save_checkpoint(pushed, folder=folder, trainer=rank)
    end = rank.step(batch(folder, "c"), update, "c")
    weights = rank.weights(folder.weights(2), 2).version
    for restored in (rank, FakeRank(0, 1, None)):
        ref = checkpoints.latest(folder)
        assert ref is not None and (ref.version, ref.last_key) == (pushed, "b")
        restored.restore(ref)
        assert restored.step(batch(folder, "b"), update, "b").optimizer_step == 2
        assert restored.step(batch(folder, "c"), update, "c") == end
        assert restored.weights(folder.weights(2), 2).version == weights
    flipped = path(folder, 1, "fake.json")
    flipped.write_text(flipped.read_text().replace('"last"', '"lost"'))
    with pytest.raises(DamagedCheckpoint, match="fake.json has changed since it was saved"):
        rank.restore(ref)


def test_a_repeated_step_keeps_the_checkpoint_it_has_and_replaces_a_damaged_one(folder: RunFolder) -> None:
    rank = FakeRank(0, 1, None)
    for number in (1, 2):
        rank.step(batch(folder, str(number)), UpdateParams("ppo_clip"), str(number))
        pushed = rank.weights(folder.weights(number), number).version
        save_checkpoint(pushed, folder=folder, trainer=rank)
    published = path(folder, 2, "checkpoint.json").stat().st_ino
    save_checkpoint(pushed, folder=folder, trainer=rank)
    assert path(folder, 2, "checkpoint.json").stat().st_ino == published
    path(folder, 2, "fake.json").write_text("{}")
    save_checkpoint(pushed, folder=folder, trainer=rank)
    assert checkpoints.complete(folder) == [1, 2]
