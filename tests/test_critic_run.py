"""Runs with a critic, on fake engines: what a step leaves, and that it is replayed, kept and gone on with as others."""

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from milepost.flows.replay import replay
from milepost.flows.train import resume
from milepost.flows.what_if import what_if
from milepost.storage import manifest, runs
from milepost.storage.runs import RunFolder
from milepost.storage.tables import TableRef, read_table
from milepost.storage.verify import verify

from .stored_run import stored_run

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect_server", "ray_cluster")]

GAE = ["algorithm.advantage=gae", "algorithm.gae_lambda=0.5", "critic.pretrain_steps=1"]


@pytest.fixture(scope="module")
def folder(
    tmp_path_factory: pytest.TempPathFactory, model_dir: str, prefect_server: str, ray_cluster: None
) -> Iterator[RunFolder]:
    """Four steps of two batches, the first of which train the critic alone."""
    with stored_run(tmp_path_factory.mktemp("critic"), model_dir, *GAE, steps=4) as run:
        yield run


def commit(folder: RunFolder, step: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(folder.step(step), "journal", "optimize-r0.json").read_text())
    return found


def test_the_critic_learns_from_the_first_step_and_the_policy_from_the_second(folder: RunFolder) -> None:
    closed = [manifest.load(folder, step) for step in range(4)]
    digests = [each.version_out.partition("-")[2] for each in closed]
    assert closed[0].version_in.partition("-")[2] == digests[0] and len(set(digests)) == 4
    assert [each.metrics["train/optimizer_steps"] for each in closed] == [0, 2, 2, 2]
    assert [each.metrics["train/critic-optimizer_steps"] for each in closed] == [2] * 4
    errors = [abs(each.metrics["rollout/values"] - each.metrics["rollout/returns"]) for each in closed]
    assert max(errors[1:]) < errors[0] and closed[0].metrics["rollout/values"] == 0
    assert verify(folder).faults == []


def test_batches_have_values_and_returns_that_give_their_advantages(folder: RunFolder) -> None:
    tables = [read_table(TableRef(**ref)) for ref in commit(folder, 2)["tables"].values()]
    for row in (row for table in tables for row in table.to_pylist()):
        assert len(set(row["values"])) == 1 and len(row["returns"]) == len(row["values"]) == len(row["advantages"])
        np.testing.assert_allclose(np.subtract(row["returns"], row["values"]), row["advantages"], atol=1e-6)
        assert row["returns"][-1] == pytest.approx(row["reward"])


def test_verify_looks_at_what_the_critic_was_taught(folder: RunFolder, tmp_path: Path) -> None:
    shutil.copytree(folder.uri, tmp_path / "stored")
    again = runs.run_folder(str(tmp_path), "stored")
    path = Path(again.step(0), "journal", "optimize-r0.json")
    content = json.loads(path.read_text())
    content["record"]["critic"]["results"][1] |= {"key": "another", "optimizer_step": 5}
    path.write_text(json.dumps(content))
    assert [fault.problem for fault in verify(again).faults] == [
        "critic result 1 has the key of another batch",
        "optimizer steps do not count the applied batches: 1 then 5",
    ]


def test_a_replay_is_identical_and_another_lambda_or_estimator_is_answered(folder: RunFolder) -> None:
    root = str(Path(folder.uri).parent)
    assert asyncio.run(replay(run="stored", root=root))["verdict"] == "identical"
    found = asyncio.run(what_if(run="stored", overrides=("algorithm.gae_lambda=1",), root=root, steps="0:2"))
    differing = {(row["step"], row["metric"]) for row in found["rows"] if row["stored"] != row["now"]}
    assert (1, "value_loss") in differing and (1, "advantage_magnitude") in differing
    told = ("algorithm.advantage=grpo", "algorithm.gae_lambda=1", "critic.pretrain_steps=0")
    found = asyncio.run(what_if(run="stored", overrides=told, root=root, steps="3:4"))
    assert {row["metric"] for row in found["rows"] if row["now"] is None} >= {"value_loss", "critic-grad_norm"}


def test_a_kept_replay_from_the_middle_has_the_critic_that_the_run_had_there(folder: RunFolder) -> None:
    root = str(Path(folder.uri).parent)
    found = asyncio.run(replay(run="stored", root=root, steps="1:3", first="optimize", into="kept"))
    kept = runs.run_folder(root, "kept")
    assert found["verdict"] == "identical" and verify(kept).faults == []
    assert manifest.load(kept, 1).metrics["train/value_loss"] == manifest.load(folder, 2).metrics["train/value_loss"]


def test_a_run_that_was_killed_after_optimize_goes_on_as_if_it_had_not_been(folder: RunFolder) -> None:
    """Its last step is committed and not closed; the checkpoint is of two steps before."""
    closed, state = manifest.load(folder, 3), Path(folder.checkpoint(4), "fake.json")
    before = json.loads(state.read_text())
    Path(folder.manifest(3)).unlink()
    shutil.rmtree(folder.checkpoint(4))
    asyncio.run(resume(run="stored", root=str(Path(folder.uri).parent)))
    assert json.loads(state.read_text()) == before and before["critic"]["last"]["optimizer_step"] == 8
    again = manifest.load(folder, 3)
    assert (again.accounting, again.version_out) == (closed.accounting, closed.version_out)
    assert verify(folder).faults == []
