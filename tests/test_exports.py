"""Weights that were exported from checkpoints: kept as long as anything needs them, and no longer."""

import asyncio
import json
from pathlib import Path

import pytest
from prefect.client.schemas.objects import State, StateType

from milepost.engines.protocols import WeightSource
from milepost.flows import checkpoint_weights
from milepost.flows.checkpoint import find_weights
from milepost.flows.evaluate import evaluate
from milepost.storage import checkpoints, files, runs
from milepost.storage.evaluated import Evaluated
from milepost.storage.exports import kept_export
from milepost.storage.retention import retain
from milepost.storage.runs import RunFolder

from .bench.made_run import MadeRun, make_run


@pytest.fixture
def made(tmp_path: Path) -> MadeRun:
    return make_run(str(tmp_path), 3)


def exported(made: MadeRun, step: int) -> Path:
    uri = kept_export(made.folder, checkpoints.load_manifest(made.folder.checkpoint(step)).version)
    files.publish(files.join(uri, "model.safetensors"), b"weights")
    return Path(uri)


def evaluation(made: MadeRun, step: int) -> RunFolder:
    """One of the weights after `step` steps that has not come to its end."""
    folder = runs.run_folder(made.folder.uri.rpartition("/")[0], "scored")
    place = made.folder.checkpoint(step)
    version = checkpoints.load_manifest(place).version
    of = Evaluated(f"made@{step}", place, "made", f"{version.step}-{version.digest}")
    record = json.loads(Path(made.folder.record).read_text())
    files.publish_json(folder.record, record | {"run_id": "scored", "data": record["data"] | of.entry()})
    return folder


def test_they_go_with_their_checkpoint(made: MadeRun) -> None:
    first, last = exported(made, 1), exported(made, 3)
    half = first.parent / ".000001.half.tmp"
    half.mkdir()
    assert retain(made.folder, keep_last=2) == [1]
    assert not first.exists() and last.exists() and half.exists()


def test_those_that_an_evaluation_is_at_stay_until_it_has_ended(made: MadeRun) -> None:
    first, scored = exported(made, 1), evaluation(made, 1)
    (Path(made.folder.uri).parent / "broken").mkdir()
    (Path(made.folder.uri).parent / "broken" / "run.json").write_text("{")
    retain(made.folder, keep_last=2)
    assert first.exists() and not Path(made.folder.checkpoint(1)).exists()
    files.publish(scored.manifest(0), b"{}")
    retain(made.folder, keep_last=2)
    assert not first.exists()


def test_a_checkpoint_stays_while_somebody_waits_to_read_its_weights(
    made: MadeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def convert(folder: RunFolder, source: WeightSource) -> None:
        retain(folder, keep_last=1)
        assert checkpoints.complete(folder) == [1, 3], "it is its turn only now, and the run has gone on"

    monkeypatch.setattr(checkpoint_weights, "_convert", convert)
    weights = find_weights("made@1", made.folder.uri.rpartition("/")[0])
    asyncio.run(checkpoint_weights.exported_weights(weights, "scored"))
    assert retain(made.folder, keep_last=1) == [1]


def test_an_evaluation_of_a_checkpoint_that_was_removed_is_skipped_where_nobody_waits_for_it(made: MadeRun) -> None:
    root = made.folder.uri.rpartition("/")[0]
    retain(made.folder, keep_last=1)
    with pytest.raises(LookupError, match="no checkpoint of step 1 any more"):
        asyncio.run(evaluate.fn(checkpoint="made@1", root=root))
    skipped = asyncio.run(evaluate.fn(checkpoint="made@1", root=root, skip_removed=True))
    assert isinstance(skipped, State) and (skipped.type, skipped.name) == (StateType.COMPLETED, "Skipped")
    with pytest.raises(LookupError, match="no checkpoint of step 9: there are 0, 3"):
        asyncio.run(evaluate.fn(checkpoint="made@9", root=root, skip_removed=True))


def test_those_of_other_weights_than_the_checkpoint_has_go(made: MadeRun) -> None:
    other = Path(made.folder.workspace, "exports", f"{3:06d}-{'0' * 12}")
    other.mkdir(parents=True)
    retain(made.folder, keep_last=2)
    assert not other.exists()
