"""Killed and resumed, a run ends as the run that nobody disturbed: same tables, same weights, same prompts."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chaos.harness import Case, compare, finish, kill_flow_after, kill_victim, settings_of

pytestmark = pytest.mark.slow

FAKE = ["engines.train=fake", "engines.rollout=fake", "checkpoint.every_steps=2"]
BOUNDARIES = ["0/sample-r0", "0/generate-r0-s001", "1/score-r0-s000", "1/filter-r0-s001", "2/optimize-r0", "2/manifest"]


def case(root: Path, name: str, settings: list[str], *, steps: int) -> Case:
    (root / name).mkdir()
    return Case(root / name, settings, steps)


def test_the_flow_may_be_killed_at_every_boundary(tmp_path: Path, model_dir: str, prompts: Callable[..., str]) -> None:
    settings = settings_of(model_dir, prompts(6), *FAKE)
    calm, disturbed = (case(tmp_path, name, settings, steps=4) for name in ("calm", "disturbed"))
    finish(calm)
    for boundary in BOUNDARIES:
        assert kill_flow_after(disturbed, boundary), boundary
    finish(disturbed)
    assert compare(calm, disturbed) == []


def test_real_engines_end_with_the_same_weights_after_kills(
    tmp_path: Path, model_dir: str, prompts: Callable[..., str]
) -> None:
    """Checkpoints every two steps: after the last kill one finished step and one committed stage are applied again."""
    settings = settings_of(model_dir, prompts(6), "checkpoint.every_steps=2")
    calm, disturbed = (case(tmp_path, name, settings, steps=4) for name in ("calm", "disturbed"))
    finish(calm)
    for boundary in ("1/optimize-r0", "3/optimize-r0"):
        assert kill_flow_after(disturbed, boundary), boundary
    finish(disturbed)
    assert compare(calm, disturbed, real=True) == []


@pytest.mark.parametrize("victim", ["engine", "rank", "router", "grader"])
def test_a_run_survives_the_death_of_an_engine(
    tmp_path: Path, model_dir: str, prompts: Callable[..., str], victim: str
) -> None:
    settings = settings_of(model_dir, prompts(6), *FAKE)
    calm, disturbed = (case(tmp_path, name, settings, steps=12) for name in ("calm", "disturbed"))
    finish(calm)
    assert kill_victim(disturbed, victim, random.Random(0), fatal=False)
    assert compare(calm, disturbed) == []
