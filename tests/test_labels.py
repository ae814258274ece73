"""Labels are asked about before a run begins: each costs at most itself, and what is said names the reward."""

import json
from pathlib import Path
from typing import Any

import pytest

from milepost.storage.parameters import DataSection, RewardSection
from milepost.storage.prompts import load_prompts
from milepost.tasks.labels import LabelCheck

from .conftest import Prompts
from .test_cli import milepost, refused
from .test_cli import settings as overrides
from .test_prompts import Characters, write

EVEN = "tests.rewards_for_tests:even"


def problems(section: RewardSection, *asked: Any, **metadata: Any) -> list[str]:
    with LabelCheck(section, seconds=5.0) as check:
        return check([(label, metadata) for label in asked])


def test_each_label_is_judged_by_the_reward_with_its_options() -> None:
    found = problems(RewardSection(name=EVEN, options={"least": 4}), 2, 3, 2, 3)
    assert found[:2] == found[2:] and found[0] == ""
    assert found[1] == f"reward {EVEN!r} cannot grade label 3: it is odd: give an even number from 4 on"


def test_a_label_that_hangs_raises_or_kills_costs_no_other() -> None:
    found = problems(RewardSection(name=EVEN), "hang", 2, "die", "text", 4)
    assert [problem.rpartition(": ")[2] for problem in (found[0], found[2])] == ["timeout", "crash"]
    assert "TypeError" in found[3] and (found[1], found[4]) == ("", "")


def test_every_part_of_a_sum_is_asked() -> None:
    parts = [{"name": "tests.rewards_for_tests:parity"}, {"name": EVEN, "options": {"least": 2}}]
    assert "from 2 on" in problems(RewardSection.model_validate({"parts": parts}), 3)[0]


def test_a_prompt_that_names_its_reward_is_judged_by_that_one() -> None:
    section = RewardSection(name="tests.rewards_for_tests:parity")
    assert "it is odd" in problems(section, 3, reward=EVEN)[0]
    assert "did you mean 'exact'" in problems(section, 3, rm_type="exactt")[0]
    assert problems(section.model_copy(update={"by_prompt": False}), 3, reward=EVEN) == [""]


@pytest.mark.parametrize("label", [None, {}, True])
def test_math_is_given_no_label_that_it_cannot_grade(tmp_path: Path, label: Any) -> None:
    path = write(tmp_path, '{"prompt": "a", "label": "1/2"}', json.dumps({"prompt": "b", "label": label}))
    with (
        LabelCheck(RewardSection()) as check,
        pytest.raises(ValueError, match=r"line 2 \(row 1\): reward 'math' cannot"),
    ):
        load_prompts(DataSection(path=str(path)), Characters(), context_length=9, check_labels=check)


def test_plan_refuses_the_row_or_moves_it_aside(model_dir: str, prompts: Prompts, tmp_path: Path) -> None:
    path = write(tmp_path, '{"prompt": "1+1=", "label": "2"}', '{"prompt": "2+2=", "label": {}}')
    knobs = ["rollout_batch_size=4", "n_samples_per_prompt=2", "apply_chat_template=false", f"path={path}"]
    good = overrides(
        *(f"data.{knob}" for knob in knobs), "algorithm.num_steps_per_rollout=1", f"model.path={model_dir}"
    )
    good += overrides("reward.name=exact", "model.context_length=64", "rollout.max_new_tokens=8")
    refused(milepost("plan", *good), "set.jsonl line 2 (row 1): reward 'exact' cannot grade label {}")
    done = milepost("plan", *good, "--set", "data.on_bad_line=quarantine", "--json")
    assert json.loads(done.stdout)["prompts quarantined"] == 1, done.stderr
