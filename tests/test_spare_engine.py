"""Evaluation on a spare engine beside the steps: the same as between them, on fake engines and the embedded one."""

import asyncio
import shutil
from pathlib import Path

import pyarrow as pa
import pytest

from milepost.engines import cluster
from milepost.engines.fleet import Fleet, fleet
from milepost.flows.held_out import PIN, held_out
from milepost.flows.loop import recover
from milepost.flows.results import evaluation_folder, evaluations
from milepost.flows.start import begin_run
from milepost.flows.tracker import Tracker
from milepost.flows.train import resume, train
from milepost.flows.view import View
from milepost.flows.watching import Watch
from milepost.storage import checkpoints, files, manifest, retention, runs
from milepost.storage.journal import Slot, StepStore
from milepost.storage.parameters import Parameters
from milepost.storage.runs import RunFolder
from milepost.storage.tables import read_table
from milepost.storage.verify import verify
from milepost.tasks.held_weights import spare_folder
from tests.e2e.test_train import trained as really_trained

from .sums import write_sums
from .test_train_fake import parameters, sections, trained

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect_server", "ray_cluster")]

SPARE = "eval.spare_engine=true"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("spare")
    write_sums(base / "prompts.jsonl", range(16))
    write_sums(base / "held-out.jsonl", range(16, 26))
    return base


def root_of(run: RunFolder) -> str:
    return run.uri.rpartition("/")[0]


def asked(base: Path) -> list[str]:
    return [f"eval.path={base / 'held-out.jsonl'}", "eval.every_steps=2", "checkpoint.every_steps=1"]


@pytest.fixture(scope="module")
def pair(base: Path, model_dir: str, prefect_server: str, ray_cluster: None) -> tuple[RunFolder, RunFolder]:
    """The same run twice: evaluated between the steps, and on a spare engine."""
    prompts = str(base / "prompts.jsonl")
    blocking, spare = (parameters(model_dir, prompts, *asked(base), *more) for more in ((), (SPARE,)))
    return trained("same", base / "blocking", blocking, steps=5), trained("same", base / "spare", spare, steps=5)


def evaluated(run: RunFolder, step: int) -> pa.Table:
    commit = StepStore(evaluation_folder(run, step), run.run_id, step).stored(Slot("evaluate"))
    assert commit is not None
    return read_table(commit.tables["rollouts"])


def test_a_spare_engine_gives_what_the_runs_own_engines_give(pair: tuple[RunFolder, RunFolder]) -> None:
    blocking, spare = pair
    assert [item.step for item in evaluations(spare)] == [0, 2, 4, 5]
    assert evaluations(spare) == evaluations(blocking)
    for step in (0, 2, 4, 5):
        assert evaluated(spare, step).equals(evaluated(blocking, step))


def test_nothing_is_left_of_what_was_kept_for_it(pair: tuple[RunFolder, RunFolder]) -> None:
    assert files.names(files.join(pair[1].uri, "spare")) == ["weights"]
    assert verify(pair[1]).faults == []


@pytest.fixture
def waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """While this file is there, the evaluation of the weights after two steps goes on."""
    path = tmp_path / "waiting"
    path.touch()
    monkeypatch.setenv("MILEPOST_TEST_WAIT", str(path))
    return path


def slow(base: Path, model_dir: str, *more: str) -> Parameters:
    function = "rollout.function=tests.rewards_for_tests:second_evaluation_waits"
    return parameters(model_dir, str(base / "prompts.jsonl"), *asked(base), SPARE, function, *more)


async def interrupted(folder: RunFolder, chosen: Parameters) -> None:
    """Train until nothing goes on without the evaluation that waits, and end it there."""
    running = asyncio.create_task(train(run="same", root=root_of(folder), steps=5, **sections(chosen)))
    async with asyncio.timeout(120):
        while len(manifest.finished_steps(folder)) < 4:
            await asyncio.sleep(0.1)
    assert [item.step for item in evaluations(folder)] == [0]
    running.cancel()
    with pytest.raises((asyncio.CancelledError, BaseExceptionGroup)):
        await running


@pytest.mark.parametrize("is_kept", [True, pytest.param(False, marks=pytest.mark.long)])
def test_steps_go_on_and_what_was_not_ended_is_made_up(
    is_kept: bool, pair: tuple[RunFolder, RunFolder], base: Path, model_dir: str, tmp_path: Path, waiting: Path
) -> None:
    folder = runs.run_folder(str(tmp_path), "same")
    asyncio.run(interrupted(folder, slow(base, model_dir)))
    waiting.unlink()
    if not is_kept:  # as on another machine: its checkpoint is there, though two newer ones are
        shutil.rmtree(spare_folder(folder).uri)
    asyncio.run(resume(run="same", root=str(tmp_path)))
    assert evaluations(folder) == evaluations(pair[0])
    assert evaluated(folder, 2).equals(evaluated(pair[0], 2))
    assert retention.pinned(folder, PIN) == set() and len(checkpoints.complete(folder)) <= 3


@pytest.mark.parametrize(("restarts", "said"), [(1, "rollout engine 1 died and starts again"), (0, "later ones are")])
def test_a_spare_engine_that_dies_ends_no_run(
    restarts: int, said: str, base: Path, model_dir: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = slow(base, model_dir, f"engines.max_restarts={restarts}")
    launched = begin_run(str(tmp_path), runs.run_folder(str(tmp_path), f"dies-{restarts}"), 5, chosen, fence=0)

    async def main(engines: Fleet) -> None:
        _, position = await recover(launched, engines)
        watch = Watch(launched, Tracker(launched.folder, "", None))
        assert engines.spare is not None
        cluster.kill(engines.spare.engines[0].owned)
        async with held_out(launched, engines, watch, View()) as evaluations:
            await evaluations.begin(position.version)
            await evaluations.end(position.version, due=True)

    with fleet(launched.folder.run_id, launched.parameters, model_dir) as engines:
        asyncio.run(main(engines))
    assert [item.step for item in evaluations(launched.folder)] == [0]
    assert said in capsys.readouterr().err


@pytest.mark.long
def test_an_embedded_spare_engine_gives_the_same_tokens_under_the_same_weights(
    base: Path, model_dir: str, tmp_path: Path
) -> None:
    own = [f"eval.path={base / 'held-out.jsonl'}", "eval.every_steps=1"]
    for name in ("blocking", "spare"):
        (tmp_path / name).mkdir()
    blocking = really_trained("same", tmp_path / "blocking", model_dir, *own)
    spare = really_trained("same", tmp_path / "spare", model_dir, *own, SPARE)
    columns = ["sample_id", "response_token_ids", "reward", "weight_version_min", "weight_version_max"]
    for step in range(3):
        assert evaluated(spare, step).select(columns).equals(evaluated(blocking, step).select(columns))
    assert verify(spare).faults == []
