"""A run that failed and goes on: nothing is generated or graded twice, and the prompts come as if nothing had been."""

import asyncio
import shutil
from pathlib import Path

import pytest

from milepost.flows.results import evaluations
from milepost.flows.sql import as_rows, query
from milepost.flows.train import resume
from milepost.storage import attempts, manifest, runs
from milepost.storage.runs import RunFolder
from milepost.storage.verify import verify

from .conftest import Prompts
from .rewards_for_tests import GENERATED
from .test_train_fake import parameters, trained

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect_server", "ray_cluster")]

STEPS = 3
SERVED = "select step, prompt_id from rollouts group by all order by 1, 2"


def test_what_was_generated_and_graded_is_not_asked_for_again(
    tmp_path: Path, model_dir: str, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight prompts are an epoch and a step: the run fails in the second; a fresh one serves the same."""
    log, fault = tmp_path / "graded", tmp_path / "fault"
    monkeypatch.setenv("MILEPOST_TEST_BREAK", str(fault))
    told = ["algorithm.advantage=breaks_in_step_one", "rollout.function=recorded_turn", "reward.name=recorded"]
    named = [word.replace("=", "=tests.rewards_for_tests:") for word in told]
    compared = ["algorithm.kl_loss_coef=0.1", "reference.refresh_every_steps=2"]
    chosen = parameters(model_dir, prompts(8), *named, *compared, f'reward.options={{"log": "{log}"}}')
    GENERATED.clear()
    fault.touch()
    with pytest.raises(RuntimeError, match="broken as told"):
        trained("failed", tmp_path, chosen, steps=STEPS)
    assert len(GENERATED) == len(lines(log)) == 2 * 8 * 2
    fault.unlink()
    asyncio.run(resume(run="failed", root=str(tmp_path)))
    folder = runs.run_folder(str(tmp_path), "failed")
    assert len(set(GENERATED)) == len(GENERATED) == len(lines(log)) == STEPS * 8 * 2
    assert verify(folder).faults == []
    fresh = trained("fresh", tmp_path, chosen, steps=STEPS)
    assert rows(folder) == rows(fresh) and len(rows(fresh)) == STEPS * 8
    assert manifest.load(folder, 2).version_out == manifest.load(fresh, 2).version_out


def test_a_run_that_ended_before_its_last_evaluation_makes_up_for_it(
    tmp_path: Path, model_dir: str, prompts: Prompts
) -> None:
    held_out = prompts(4, name="held-out.jsonl")
    chosen = parameters(model_dir, prompts(), f"eval.path={held_out}", "eval.every_steps=5")
    folder = trained("short", tmp_path, chosen, steps=1)
    before = evaluations(folder)
    shutil.rmtree(f"{folder.uri}/evals/000001")
    asyncio.run(resume(run="short", root=str(tmp_path)))
    assert evaluations(folder) == before and [item.step for item in before] == [0, 1]
    asyncio.run(resume(run="short", root=str(tmp_path)))
    assert len(attempts.attempts(folder)) == 1


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def rows(folder: RunFolder) -> list[tuple[object, ...]]:
    return as_rows(query([folder], SERVED))[1]
