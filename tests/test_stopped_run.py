"""A run that a rule has stopped, on fake engines: what it leaves, what is said of it, and how it goes on."""

import asyncio
from pathlib import Path

import pytest

from milepost.flows.checkpoint import find_weights
from milepost.flows.launch import summary
from milepost.flows.results import evaluations
from milepost.flows.run_status import run_status
from milepost.flows.train import resume
from milepost.storage import attempts, checkpoints, files, manifest, retention, stops
from milepost.storage.runs import RunFolder
from milepost.storage.verify import verify

from .test_train_fake import parameters, trained

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect_server", "ray_cluster")]


@pytest.fixture(scope="module")
def stopped(
    tmp_path_factory: pytest.TempPathFactory, model_dir: str, prefect_server: str, ray_cluster: None
) -> RunFolder:
    """Of nine steps, the rule lets it come to the second."""
    base = tmp_path_factory.mktemp("stopped")
    path = base / "prompts.jsonl"
    path.write_text("".join(f'{{"prompt": "{number}+1=", "label": "{number + 1}"}}\n' for number in range(16)))
    rules = ['stop.bounds=[{"metric":"train/grad_norm","above":0.5,"in_a_row":2}]']
    chosen = parameters(model_dir, str(path), *rules, f"eval.path={path}@[0:4]", "eval.every_steps=5")
    return trained("stopped", base / "runs", chosen, steps=9)


def root_of(run: RunFolder) -> str:
    return run.uri.rpartition("/")[0]


def test_it_ends_in_good_order_with_a_checkpoint_and_an_evaluation_of_its_last_weights(stopped: RunFolder) -> None:
    assert manifest.finished_steps(stopped) == [0, 1] and checkpoints.complete(stopped) == [2]
    assert [item.step for item in evaluations(stopped)] == [0, 2]
    assert [stop.after for stop in stops.stops(stopped)] == [2]
    assert verify(stopped).faults == [] and verify(stopped).checkpoints == 1


def test_why_is_said_wherever_one_looks(stopped: RunFolder) -> None:
    found, why = run_status(stopped), "train/grad_norm is 1, which is above 0.5, 2 times in a row (stop.bounds)"
    assert (found.state, found.done, found.steps, found.stopped) == ("finished", 2, 9, why)
    assert summary(stopped)["stopped"] == why
    assert "above 0.5, 2 times in a row" in files.read(stopped.report).decode()


def test_the_best_checkpoint_is_pinned(stopped: RunFolder) -> None:
    assert retention.pinned(stopped, "best") == {2}
    best = find_weights("stopped@best", root_of(stopped)).version
    assert best is not None and best.step == 2


def test_going_on_is_refused_while_the_rule_holds_and_goes_to_where_another_one_stops_it(
    stopped: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    asyncio.run(resume(run="stopped", root=root_of(stopped)))
    assert "stopped after 2 of 9 steps by stop.bounds: train/grad_norm is 1" in capsys.readouterr().err
    assert attempts.newest(stopped) == 1
    looser = ['stop.bounds=[{"metric":"train/grad_norm","above":0.5,"in_a_row":3}]']
    given = attempts.current(stopped).parameters
    chosen = parameters(
        given.model.path, given.data.path, *looser, f"eval.path={given.eval.path}", "eval.every_steps=5"
    )
    trained("stopped", Path(root_of(stopped)), chosen, steps=9)
    assert manifest.finished_steps(stopped) == [0, 1, 2] and checkpoints.complete(stopped) == [2, 3]
    assert [stop.attempt for stop in stops.stops(stopped)] == [1, 2]
    assert verify(stopped).faults == []
