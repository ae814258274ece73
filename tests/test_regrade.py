"""Stored samples under another reward: who flips, what is shown of it, and that nothing stored changes."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from milepost.engines.local_graders import LocalGraders
from milepost.flows.regrading import Regraded, judged, regrade_run, regrade_steps, step_rollouts
from milepost.storage.parameters import RewardSection

from .bench.made_run import MadeRun, make_run

STEPS = 3


@pytest.fixture
def made(tmp_path: Path) -> MadeRun:
    return make_run(str(tmp_path), STEPS)


def regraded(made: MadeRun, reward: str | None, **options: object) -> Regraded:
    section = RewardSection(name=reward, **options) if reward else None
    root = str(Path(made.folder.uri).parent)
    return asyncio.run(regrade_run("made", root, reward=section, steps="", threshold=0.5, workers=2))


@pytest.mark.parametrize(("score", "found"), [(0.5, "right"), (0.49, "wrong"), (None, "unscored"), (-1.0, "wrong")])
def test_a_score_from_the_threshold_on_is_right(score: float | None, found: str) -> None:
    assert judged(score, 0.5) == found


def test_every_sample_is_in_the_confusion_table_once(made: MadeRun) -> None:
    found = regraded(made, "tests.rewards_for_tests:always_one")
    stored = [value for step in range(STEPS) for value in step_rollouts(made.folder, step)["reward"].to_pylist()]
    wrong = sum(value is not None and value < 0.5 for value in stored)
    assert sum(count for row in found.confusion.values() for count in row.values()) == len(stored) == found.samples
    assert found.confusion["wrong"] == {"right": wrong, "wrong": 0, "unscored": 0}
    assert found.flips == len(stored) - found.confusion["right"]["right"]
    assert [point.now for point in found.curve] == [1.0] * STEPS


def test_a_flip_is_shown_with_both_scores_and_the_sample(made: MadeRun) -> None:
    found = regraded(made, "tests.rewards_for_tests:always_one")
    rows = {row["sample_id"]: row for step in range(STEPS) for row in step_rollouts(made.folder, step).to_pylist()}
    assert found.examples
    for flip in found.examples:
        assert (flip.stored, flip.now) == (rows[flip.sample_id]["reward"], 1.0)
        assert flip.response == rows[flip.sample_id]["response"]


def test_a_reward_that_cannot_score_leaves_samples_unscored_with_the_reason(made: MadeRun) -> None:
    found = regraded(made, "tests.rewards_for_tests:breaks")
    assert all(row["right"] == row["wrong"] == 0 for row in found.confusion.values())
    assert found.examples[0].reason.startswith("error: ")


@pytest.mark.parametrize(
    ("reward", "problem"),
    [
        ("exakt", "did you mean 'exact'"),
        ("tests.rewards_for_tests:absent", "absent"),
        ("no_such_module:fn", "no_such_module"),
    ],
)
def test_a_reward_that_does_not_resolve_is_named_and_nothing_is_scored(
    made: MadeRun, reward: str, problem: str
) -> None:
    with pytest.raises((LookupError, ValueError), match=problem):
        regraded(made, reward)


def test_a_damaged_table_is_refused_in_the_words_of_verify(made: MadeRun) -> None:
    table = made.table(1, "filter-r0-s000")
    table.write_bytes(table.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"filter-r0-s000.* has digest .* was written: restore it from a copy"):
        regraded(made, "tests.rewards_for_tests:always_one")


def test_local_graders_answer_in_order_and_within_their_deadline() -> None:
    with LocalGraders(workers=2) as graders:
        items = [(value,) for value in (0.0, 5.0, 0.0)]
        answers = asyncio.run(graders.map("time:sleep", items, timeout_seconds=0.5))
    assert [answer.reason for answer in answers] == [None, "timeout", None]


def test_regrading_no_steps_finds_nothing(made: MadeRun) -> None:
    with LocalGraders(workers=1) as graders:
        found = asyncio.run(regrade_steps(made.folder, [], RewardSection(name="exact"), graders))
    assert (found.samples, found.flips, found.flip_percent) == (0, 0, 0.0)
    assert isinstance(step_rollouts(made.folder, 0), pa.Table)


def test_regrading_waits_for_no_import_of_prefect_or_ray() -> None:
    code = (
        "import sys, milepost.flows.regrading as r; print([n for n in ('prefect', 'ray', 'torch') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
