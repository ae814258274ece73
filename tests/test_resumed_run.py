"""A run that failed and goes on: nothing is generated or graded twice, and the prompts come as if nothing had been."""

import asyncio
import shutil
from pathlib import Path

import pytest

from milepost.flows.results import evaluations
from milepost.flows.sql import as_rows, query
from milepost.flows.train import resume
from milepost.storage import attempts, manifest, runs
from milepost.storage.parameters import Parameters
from milepost.storage.runs import RunFolder
from milepost.storage.verify import verify

from .rewards_for_tests import GENERATED
from .sums import write_sums
from .test_train_fake import parameters, trained

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect_server", "ray_cluster")]

STEPS, EVALUATED = 3, 4
SAMPLES = 8 * 2
SERVED = "select step, prompt_id from rollouts group by all order by 1, 2"


def chosen(base: Path, model_dir: str) -> Parameters:
    """Eight prompts are an epoch and a step, and four are evaluated at first and at last."""
    told = ["algorithm.advantage=breaks_in_step_one", "rollout.function=recorded_turn", "reward.name=recorded"]
    named = [word.replace("=", "=tests.rewards_for_tests:") for word in told]
    compared = ["algorithm.kl_loss_coef=0.1", "reference.refresh_every_steps=2"]
    held_out = [f"eval.path={write_sums(base / 'held-out.jsonl', range(EVALUATED))}", "eval.every_steps=5"]
    log = f'reward.options={{"log": "{base / "graded"}"}}'
    return parameters(model_dir, write_sums(base / "prompts.jsonl", range(8)), *named, *compared, *held_out, log)


@pytest.fixture(scope="module")
def fresh(
    tmp_path_factory: pytest.TempPathFactory, model_dir: str, prefect_server: str, ray_cluster: None
) -> RunFolder:
    """The run, undisturbed."""
    base = tmp_path_factory.mktemp("fresh")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MILEPOST_TEST_BREAK", str(base / "fault"))
        return trained("fresh", base, chosen(base, model_dir), steps=STEPS)


def test_what_was_generated_and_graded_is_not_asked_for_again(
    fresh: RunFolder, tmp_path: Path, model_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run fails in its second step; a fresh one serves the same."""
    log, fault = tmp_path / "graded", tmp_path / "fault"
    monkeypatch.setenv("MILEPOST_TEST_BREAK", str(fault))
    GENERATED.clear()
    fault.touch()
    with pytest.raises(RuntimeError, match="broken as told"):
        trained("failed", tmp_path, chosen(tmp_path, model_dir), steps=STEPS)
    assert len(GENERATED) == len(lines(log)) == EVALUATED + 2 * SAMPLES
    fault.unlink()
    asyncio.run(resume(run="failed", root=str(tmp_path)))
    folder = runs.run_folder(str(tmp_path), "failed")
    assert len(set(GENERATED)) == len(GENERATED) == len(lines(log)) == 2 * EVALUATED + STEPS * SAMPLES
    assert verify(folder).faults == []
    assert rows(folder) == rows(fresh) and len(rows(fresh)) == STEPS * 8
    assert manifest.load(folder, 2).version_out == manifest.load(fresh, 2).version_out


def test_a_run_that_ended_before_its_last_evaluation_makes_up_for_it(
    fresh: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = fresh.uri.rpartition("/")[0]
    monkeypatch.setenv("MILEPOST_TEST_BREAK", f"{root}/fault")
    before = evaluations(fresh)
    shutil.rmtree(f"{fresh.uri}/evals/{STEPS:06d}")
    asyncio.run(resume(run="fresh", root=root))
    assert evaluations(fresh) == before and [item.step for item in before] == [0, STEPS]
    asyncio.run(resume(run="fresh", root=root))
    assert len(attempts.attempts(fresh)) == 1


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def rows(folder: RunFolder) -> list[tuple[object, ...]]:
    return as_rows(query([folder], SERVED))[1]
