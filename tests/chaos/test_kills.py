"""Killed and resumed, a run ends as the run that nobody disturbed: same tables, same weights, same prompts."""

import json
from pathlib import Path

import pytest

from milepost.storage import manifest
from tests.chaos.harness import Case, compare, faults, finish, kill_flow_after, kill_in_turn, settings_of

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.usefixtures("prefect_server")]

FAKE = ["engines.train=fake", "engines.rollout=fake", "checkpoint.every_steps=2"]
BOUNDARIES = ["0/generate-r0-s001", "2/optimize-r0"]  # all of them in `make chaos`
# When each process of a run is killed that is not the flow's: before it generates, grades, trains and routes.
MOMENTS = {"engine": "1/sample-r0", "grader": "2/generate-r0-s000", "rank": "3/filter-r0-s001", "router": "5/sample-r0"}
STEPS = 6
# Two requests at a time: when enough groups are kept, others have not begun.
OVER = ["rollout.over_sampling_batch_size=6", "rollout.partial=true", "rollout.concurrency=2"]


def begun(root: Path, settings: list[str], *, steps: int) -> Case:
    root.mkdir(parents=True)
    return Case(root, settings, steps)


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory, model_dir: str, prefect_server: str) -> Case:
    """A run on fake engines that nobody disturbs."""
    root = tmp_path_factory.mktemp("calm")
    prompts = root / "prompts.jsonl"
    rows = [{"prompt": f"{number}+1=", "label": str(number + 1)} for number in range(6)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    case = begun(root / "run", settings_of(model_dir, str(prompts), *FAKE), steps=STEPS)
    finish(case)
    return case


@pytest.mark.parametrize(
    ("more", "boundaries", "steps"),
    [
        pytest.param([], BOUNDARIES, STEPS, id="all"),
        pytest.param(OVER, ["1/generate-r0-s001"], 4, id="over", marks=pytest.mark.long),
    ],
)
def test_the_flow_may_be_killed_between_its_stages(
    tmp_path: Path, fake: Case, more: list[str], boundaries: list[str], steps: int
) -> None:
    disturbed = begun(tmp_path / "run", [*fake.settings, *more], steps=steps)
    for boundary in boundaries:
        assert kill_flow_after(disturbed, boundary), boundary
    finish(disturbed)
    assert (faults(disturbed) if more else compare(fake, disturbed)) == []
    assert ("interrupted" in manifest.load(disturbed.folder, 1).accounting) == bool(more)


def test_a_run_survives_the_death_of_each_of_its_engines(tmp_path: Path, fake: Case) -> None:
    disturbed = begun(tmp_path / "run", fake.settings, steps=fake.steps)
    kill_in_turn(disturbed, MOMENTS)
    assert compare(fake, disturbed) == []


@pytest.mark.long
def test_real_engines_end_with_the_same_weights_after_a_kill(tmp_path: Path, fake: Case) -> None:
    """Checkpoints every two steps: after the kill a finished step and a committed stage are applied again."""
    settings = [setting for setting in fake.settings if not setting.startswith("engines.") or "threads" in setting]
    calm, disturbed = (begun(tmp_path / name, settings, steps=4) for name in ("calm", "disturbed"))
    finish(calm)
    assert kill_flow_after(disturbed, "3/optimize-r0")
    finish(disturbed)
    assert compare(calm, disturbed, real=True) == []
