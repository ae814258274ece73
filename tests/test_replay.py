"""Stored steps run again, on fake engines: the verdict, and what makes it another."""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from milepost.flows.replay import replay
from milepost.flows.step_range import step_range
from milepost.flows.what_if import changed, what_if
from milepost.storage.parameters import Parameters
from milepost.storage.runs import RunFolder

from .stored_run import doubled_reward, stored_run


@pytest.mark.parametrize(
    ("text", "steps"), [("", [0, 1, 2, 3]), ("1:3", [1, 2]), ("2:", [2, 3]), (":1", [0]), ("3", [3])]
)
def test_a_range_of_steps_is_read_as_python_reads_a_slice(text: str, steps: list[int]) -> None:
    assert list(step_range(text, 4)) == steps


@pytest.mark.parametrize("text", ["4", "2:2", "3:5", "-1", "a:b", "0:1:2"])
def test_steps_that_are_not_finished_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--steps"):
        step_range(text, 4)


@pytest.fixture(scope="module")
def folder(
    tmp_path_factory: pytest.TempPathFactory, model_dir: str, prefect_server: str, ray_cluster: None
) -> Iterator[RunFolder]:
    with stored_run(tmp_path_factory.mktemp("replay"), model_dir, steps=4) as run:
        yield run


def replayed(folder: RunFolder, **options: Any) -> dict[str, Any]:
    found: dict[str, Any] = asyncio.run(replay(run=folder.run_id, root=str(Path(folder.uri).parent), **options))
    return found


def stages(found: dict[str, Any]) -> dict[str, str]:
    return {item["stage"]: item["difference"] for item in found["stages"]}


@pytest.mark.slow
@pytest.mark.parametrize("first", ["score", "filter", "optimize"])
def test_an_unchanged_run_is_identical_down_to_the_weights_and_is_not_touched(folder: RunFolder, first: Any) -> None:
    before = {path: path.stat().st_mtime_ns for path in Path(folder.uri).rglob("*")}
    found = replayed(folder, steps="1:4", first=first)
    assert found["verdict"] == "identical"
    assert [item["step"] for item in found["stages"] if item["stage"] == "weights"] == [1, 2, 3]
    assert {path: path.stat().st_mtime_ns for path in Path(folder.uri).rglob("*")} == before
    assert not list(Path(folder.uri).parent.glob(".replay-*"))


@pytest.mark.slow
def test_a_reward_that_answers_otherwise_is_found_with_row_column_and_both_values(folder: RunFolder) -> None:
    with doubled_reward(Path(folder.uri).parent):
        found = replayed(folder, steps="3")
    assert found["verdict"] == "different"
    differences = stages(found)
    assert re.match(r"score-r0-s000 of step 3: row \d+, column reward: stored [12].0, now [24].0", differences["score"])
    # Every stage is given what it was given then, so only the one that changed is named.
    assert not differences["filter"] and not differences["optimize"] and not differences["weights"]


@pytest.mark.slow
def test_weights_that_went_another_way_are_found(folder: RunFolder) -> None:
    path = Path(folder.manifest(3))
    kept = path.read_text()
    path.write_text(json.dumps(json.loads(kept) | {"version_out": "4-" + "0" * 32}))
    try:
        found = replayed(folder, steps="3", first="optimize")
    finally:
        path.write_text(kept)
    assert stages(found)["weights"].startswith("weights after step 3: digest: stored 0000000000000000, now ")


def asked(folder: RunFolder, *overrides: str, **options: Any) -> dict[tuple[int, str], tuple[Any, Any]]:
    root = str(Path(folder.uri).parent)
    found: dict[str, Any] = asyncio.run(what_if(run=folder.run_id, overrides=overrides, root=root, **options))
    return {(row["step"], row["metric"]): (row["stored"], row["now"]) for row in found["rows"]}


@pytest.mark.slow
def test_another_estimator_changes_advantages_and_nothing_before_them(folder: RunFolder) -> None:
    rows = asked(folder, "algorithm.advantage=reinforce", steps="2:4")
    assert {step for step, _ in rows} == {2, 3}
    assert all(stored == now for (_, name), (stored, now) in rows.items() if name in ("kept_groups", "reward"))
    # Without a baseline the advantage is the reward, and every sample was kept.
    assert all(
        now == rows[step, "reward"][1] for (step, name), (_, now) in rows.items() if name == "advantage_magnitude"
    )


@pytest.mark.slow
def test_a_filter_that_drops_groups_is_carried_on_to_the_optimizer(folder: RunFolder, tmp_path: Path) -> None:
    out = str(tmp_path / "rows.parquet")
    rows = asked(folder, "filter.group=nonzero_std", "reward.name=tests.rewards_for_tests:parity", steps="0:3", out=out)
    kept = [rows[step, "kept_groups"] for step in range(3)]
    assert all(stored == 8 for stored, _ in kept)
    assert sum(now for _, now in kept) < 24
    assert pq.read_table(out).num_rows == len(rows)


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("data.seed=1", "would need new samples"),
        ("algorithm.advantage=grpo", "changes nothing"),
        ("algorithm.advantag=rloo", "did you mean 'advantage'"),
    ],
)
def test_a_change_that_stored_samples_cannot_answer_is_refused(override: str, problem: str) -> None:
    with pytest.raises((ValueError, LookupError), match=problem):
        changed(Parameters(), [override], steps=1)
