"""A stage that hangs ends at its deadline, and says what every process was doing."""

import asyncio
from pathlib import Path

import pytest

from milepost.engines.cluster import EngineTimeout
from milepost.flows.deadline import Deadlines, longest_stages
from milepost.flows.train import train
from milepost.storage import runs
from milepost.storage.journal import StepStore
from milepost.storage.parameters import EnginesSection, Parameters

from .conftest import Prompts
from .test_train_fake import parameters, sections, trained

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect_server", "ray_cluster")]

SOON = ["engines.stage_timeout_seconds=3", "engines.max_restarts=0"]
# The deadline is that of every stage: those before the one that hangs start graders and models.
LATER = ["engines.stage_timeout_seconds=10", "engines.max_restarts=0"]
HANGING_FILTER = "filter.group=tests.stuck_for_tests:group_filter"


def stuck(run: str, root: Path, chosen: Parameters, stage: str) -> None:
    """The run fails at the deadline of its first step's `stage`, and has the stacks of its processes."""
    seconds = f"{chosen.engines.stage_timeout_seconds:g}"
    said = f"stage {stage} did not finish within {seconds} s: raise engines.stage_timeout"
    with pytest.raises(EngineTimeout, match=said):
        trained(run, root, chosen, steps=1)
    stacks = (root / run / "stacks" / "000000.txt").read_text()
    for name in ("train-0", "rollout-0", "router"):
        assert f"=== {run}/{name}\nthread " in stacks


def test_a_stage_that_hangs_fails_at_its_deadline(tmp_path: Path, model_dir: str, prompts: Prompts) -> None:
    hanging = "rollout.function=tests.stuck_for_tests:rollout"
    stuck("stuck", tmp_path, parameters(model_dir, prompts(), hanging, *SOON), "generate")


@pytest.mark.long
def test_the_stacks_show_where_a_rank_hangs(tmp_path: Path, model_dir: str, prompts: Prompts) -> None:
    real = ["engines.train=megatron", "algorithm.loss=tests.stuck_for_tests:loss", "perf.train_threads=1"]
    apart = "check.enabled=false"  # a fake engine does not sample from Megatron's model
    chosen = parameters(model_dir, prompts(), *real, apart, *LATER)
    with pytest.raises(EngineTimeout, match="stage optimize did not finish .*; what every process was doing is in"):
        trained("stuck-rank", tmp_path, chosen, steps=1)
    rank = (tmp_path / "stuck-rank" / "stacks" / "000000.txt").read_text().split("=== ")[1]
    assert rank.startswith("stuck-rank/train-0") and "stuck_for_tests.py" in rank and "in loss" in rank


def test_what_was_committed_before_a_stage_hung_is_not_done_again(
    tmp_path: Path, model_dir: str, prompts: Prompts
) -> None:
    path = prompts()
    stuck("hung", tmp_path, parameters(model_dir, path, HANGING_FILTER, *LATER), "filter")
    folder = runs.run_folder(str(tmp_path), "hung")
    store = StepStore(folder.step(0), "hung", 0)
    before = {commit.slot: commit.committed_at for commit in store.commits()}
    assert any(slot.startswith("score") for slot in before)
    cured = sections(parameters(model_dir, path, *LATER))
    asyncio.run(train(run="hung", root=str(tmp_path), steps=2, allow_change=("filter.group",), **cured))
    after = {commit.slot: commit.committed_at for commit in store.commits()}
    assert before.items() <= after.items() and "optimize-r0" in after
    assert set(longest_stages(folder, 2)) == {"sample", "generate", "score", "filter", "optimize", "sync"}
    assert longest_stages(folder, 0) == {}


def test_deadlines_come_from_the_configuration_or_from_history() -> None:
    history = {"generate": 400.0, "filter": 0.1}
    worked_out = Deadlines(EnginesSection(), history)
    assert [worked_out.seconds(stage) for stage in ("generate", "filter", "sync")] == [4000.0, 1800.0, 1800.0]
    assert Deadlines(EnginesSection(stage_timeout_seconds=5), history).seconds("generate") == 5
