"""Checkpoints of a run on fake engines: named, scored on several sets, compared, stopped, gone on with and verified."""

import asyncio
import json
import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from milepost.flows.best import RemovedCheckpoint
from milepost.flows.checkpoint import find_weights
from milepost.flows.evaluate import Regressed, evaluate
from milepost.flows.evaluation import open_evaluation
from milepost.flows.evaluation_baseline import plan_baseline
from milepost.flows.evaluation_request import plan_evaluation
from milepost.flows.purge import purge_run
from milepost.flows.replay import replay
from milepost.flows.results import evaluations
from milepost.flows.sql import as_rows, query
from milepost.storage import checkpoints, files, manifest, runs
from milepost.storage.parameters import EvalSet
from milepost.storage.retention import retain
from milepost.storage.runs import RunFolder
from milepost.storage.verify import verify

from .rewards_for_tests import GENERATED
from .sums import write_sums
from .test_purge import telling
from .test_train_fake import parameters, trained

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect_server", "ray_cluster")]

Evaluate = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, model_dir: str, prefect_server: str, ray_cluster: None) -> RunFolder:
    """Two steps with a checkpoint each, evaluated during training on two sets."""
    base = tmp_path_factory.mktemp("evaluated")
    sets = json.dumps([{"path": write_sums(base / "other.jsonl", range(20, 23)), "n_samples_per_prompt": 2}])
    chosen = parameters(
        model_dir,
        write_sums(base / "prompts.jsonl", range(16)),
        "checkpoint.every_steps=1",
        "eval.every_steps=1",
        f"eval.path={write_sums(base / 'held-out.jsonl', range(16, 26))}",
        f"eval.sets={sets}",
    )
    return trained("first", base / "runs", chosen, steps=2)


@pytest.fixture(scope="module")
def evaluated(run: RunFolder) -> Evaluate:
    """`evaluate` beside the run."""

    def of(checkpoint: str, name: str, **options: Any) -> dict[str, Any]:
        return asyncio.run(evaluate(checkpoint=checkpoint, run=name, root=root_of(run), **options))

    return of


def root_of(run: RunFolder) -> str:
    return str(Path(run.uri).parent)


def folder_of(run: RunFolder, name: str) -> RunFolder:
    return runs.run_folder(root_of(run), name)


def some(run: RunFolder, stem: str = "held-out", **values: Any) -> EvalSet:
    return EvalSet.model_validate({"path": str(Path(root_of(run)).parent / f"{stem}.jsonl"), **values})


@pytest.fixture(scope="module")
def full(run: RunFolder, evaluated: Evaluate) -> dict[str, Any]:
    """The first checkpoint on two sets, four samples a prompt in the second, against the model it began with."""
    sets = [some(run), some(run, "other", name="again", n_samples_per_prompt=4, k=[1, 3])]
    return evaluated("first@1", "full", evals=sets, compare="first@0")


def test_training_evaluates_every_set_each_time(run: RunFolder) -> None:
    assert [item.step for item in evaluations(run)] == [0, 1, 2]
    record = files.read_json(files.join(run.uri, "evals", "000001", "journal", "evaluate-r1.json"))["record"]
    assert (record["name"], record["samples"], sorted(record["pass_at"])) == ("other", 6, ["1", "2"])


def test_a_checkpoint_is_scored_with_its_own_weights(run: RunFolder, full: dict[str, Any]) -> None:
    assert full["weights"] == manifest.load(run, 0).version_out
    first, second = full["sets"]
    assert (first["name"], first["samples"], first["majority"]) == ("held-out", 10, None)
    assert (second["name"], second["samples"], sorted(second["pass_at"])) == ("again", 12, ["1", "3"])


def test_every_sample_of_an_evaluation_is_a_row_as_of_any_run(run: RunFolder, full: dict[str, Any]) -> None:
    asked = "select dataset, count(*), avg(reward), min(weight_version_min) from rollouts group by 1 order by 1 desc"
    _, rows = as_rows(query([folder_of(run, "full")], asked))
    means = [item["mean"] for item in full["sets"]]
    assert rows == [("held-out", 10, means[0], 1), ("again", 12, pytest.approx(means[1]), 1)]


def test_another_checkpoint_is_scored_on_the_same_items(run: RunFolder, full: dict[str, Any]) -> None:
    compared = full["compared"]
    assert (compared["label"], [pair["items"] for pair in compared["sets"]]) == ("first@0", [10, 3])
    held_out = compared["sets"][0]
    assert held_out["test"] == "McNemar, exact"
    assert held_out["difference"] == pytest.approx(held_out["after"] - held_out["before"])


def test_the_report_shows_sets_comparison_and_worst_items(full: dict[str, Any]) -> None:
    page = files.read(full["report"]).decode()
    assert all(text in page for text in ("pass@3", "Against first@0", "Worst items of again", "<svg"))
    assert "<script" not in page and "http" not in page


def test_a_finished_evaluation_is_answered_from_what_is_stored(
    run: RunFolder, evaluated: Evaluate, full: dict[str, Any]
) -> None:
    before = manifest.manifest_digest(folder_of(run, "full"), 0)
    assert evaluated("", "full") == full
    assert manifest.manifest_digest(folder_of(run, "full"), 0) == before


def test_another_request_under_the_same_name_is_refused(
    run: RunFolder, evaluated: Evaluate, full: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match="evaluation 'full' is of first@1, not of first@2: give it another name"):
        evaluated("first@2", "full", evals=[some(run)])
    with pytest.raises(ValueError, match="evaluation 'full' was begun with eval.sets .*: take it back, or give"):
        evaluated("first@1", "full", evals=[some(run)])


def test_a_stopped_evaluation_generates_nothing_twice(
    run: RunFolder,
    evaluated: Evaluate,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    broken = tmp_path / "broken"
    broken.touch()
    monkeypatch.setenv("MILEPOST_TEST_BREAK", str(broken))
    GENERATED.clear()
    with pytest.raises(ExceptionGroup):
        evaluated(
            "first@2",
            "stopped",
            evals=[some(run), some(run, "other", n_samples_per_prompt=2)],
            overrides=("rollout.function=tests.rewards_for_tests:second_set_breaks",),
        )
    assert len(GENERATED) == 10 and "not finished" in verify(folder_of(run, "stopped")).notes[0]
    broken.unlink()
    capsys.readouterr()
    evaluated("", "stopped")
    assert re.findall(r"stopped (\d)/2", capsys.readouterr().err) == ["2"]
    assert len(GENERATED) == len(set(GENERATED)) == 16


def test_the_gate_fails_when_a_score_fell_and_fails_again_for_whoever_goes_on(
    run: RunFolder, evaluated: Evaluate, tmp_path: Path
) -> None:
    says, fell = tmp_path / "says", re.escape("held-out fell by 1.0000 (p = 0.002): more than 0.02 may")
    sets = [some(run, reward="tests.rewards_for_tests:told", reward_options={"path": str(says)})]
    for name, score, asked in (("good", "1", {}), ("wrong", "0", {"compare": "good", "max_drop": 0.02})):
        says.write_text(score)
        with pytest.raises(Regressed, match=fell) if asked else nullcontext() as caught:
            evaluated("first@2", name, evals=sets, **asked)
    assert caught.value.found["compared"]["sets"][0]["p"] == pytest.approx(2 / 1024)
    with pytest.raises(Regressed, match=fell):
        evaluated("", "wrong")


@pytest.mark.parametrize(
    ("sets", "sentence"),
    [
        ([{"stem": "other"}], "'full' has none of the data sets .'other'., it has .'held-out', 'again'."),
        ([{"reward": "f1"}], "evaluation 'full' scored 'held-out' by .*:parity, this one does by f1: give it the same"),
        ([{"stem": "prompts", "name": "held-out"}], "evaluations of 'held-out' have no item in common: compare them"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_is_generated(
    run: RunFolder, evaluated: Evaluate, full: dict[str, Any], sets: list[dict[str, Any]], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        evaluated("first@2", "refused", evals=[some(run, **item) for item in sets], compare="full")
    assert not files.exists(folder_of(run, "refused").record)


def test_a_model_folder_is_compared_as_the_evaluation_is_made(run: RunFolder, model_dir: str) -> None:
    own = ("reward.name=f1", "rollout.max_new_tokens=3", "data.seed=7")
    plan = plan_evaluation("first@2", "asked", root_of(run), sets=[some(run)], overrides=own)
    found = plan_baseline(model_dir, "asked", root_of(run), plan.parameters, plan.prompts).plan
    assert found is not None and found.weights.run is None and found.prompts.equals(plan.prompts)
    for section in ("reward", "rollout", "data", "eval", "engines"):
        assert getattr(found.parameters, section) == getattr(plan.parameters, section)


def test_a_comparison_goes_on_with_the_checkpoint_that_was_the_latest(run: RunFolder) -> None:
    plan = plan_evaluation("first@1", "asked", root_of(run), sets=[some(run)])
    found = plan_baseline("first@latest", "asked", root_of(run), plan.parameters, plan.prompts)
    assert (found.name, found.lacks) == ("first@2", ())


def test_an_evaluation_whose_checkpoint_is_removed_before_it_is_read_is_skipped_when_told(
    run: RunFolder, tmp_path: Path
) -> None:
    root = str(
        shutil.copytree(root_of(run), tmp_path / "runs", ignore=shutil.ignore_patterns("weights", "exports", "pins"))
    )
    open_evaluation(plan_evaluation("first@1", "late", root, sets=[some(run)]), runs.run_folder(root, "late"), fence=0)
    retain(runs.run_folder(root, "first"), keep_last=1)
    with pytest.raises(RemovedCheckpoint, match="no checkpoint of step 1 any more, newer ones took its place"):
        asyncio.run(evaluate(checkpoint="", run="late", root=root))
    skipped = asyncio.run(evaluate(checkpoint="", run="late", root=root, skip_removed=True, return_state=True))
    assert skipped.name == "Skipped"


def test_a_changed_score_is_a_fault(run: RunFolder, full: dict[str, Any]) -> None:
    folder = folder_of(run, "full")
    assert verify(folder).faults == []
    journal = Path(folder.step(0)) / "journal" / "score-r0-s000.json"
    stored = journal.read_text()
    table = json.loads(stored)["tables"]["rollouts"]["uri"]
    whole = Path(table).read_bytes()
    try:
        Path(table).write_bytes(whole[:-20] + b"x" + whole[-19:])
        (fault,) = verify(folder).faults
    finally:
        Path(table).write_bytes(whole)
    assert fault.file == table and "was written" in fault.problem


def test_a_purged_prompt_is_gone_from_an_evaluation_with_its_report_and_comparisons(
    run: RunFolder, full: dict[str, Any], tmp_path: Path
) -> None:
    root = shutil.copytree(root_of(run), tmp_path / "runs")
    folder = runs.run_folder(str(root), "full")
    asked = "select prompt_id, json_extract_string(prompt, '$') from rollouts where status = 'completed' limit 1"
    gone, text = as_rows(query([folder], asked))[1][0]
    assert telling(Path(folder.uri), text)
    done = purge_run(str(root), folder, [gone], reason="asked for")
    assert telling(Path(folder.uri), text) == [] and done.left == []
    found = verify(folder)
    assert found.faults == [] and f"(asked for) of what prompts said: {gone}" in found.notes[-1]


def test_an_evaluation_has_no_steps_to_replay(run: RunFolder, full: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="'full' is an evaluation of first@1 and has no steps to run again"):
        asyncio.run(replay(run="full", root=root_of(run)))


def test_checkpoints_are_found_by_run_and_step_and_by_their_folder(run: RunFolder) -> None:
    root = root_of(run)
    version = checkpoints.load_manifest(run.checkpoint(2)).version
    for name in ("first@2", "first@latest", run.checkpoint(2), run.weights(2)):
        found = find_weights(name, root)
        assert (found.label, found.version) == ("first@2", version)
    assert find_weights("first@0", root).version is None


def test_the_best_checkpoint_has_the_highest_stored_accuracy(run: RunFolder) -> None:
    scores = {item.step: item.mean for item in evaluations(run) if item.step}
    wanted = max(scores, key=lambda step: (scores[step], -step))
    assert find_weights("first@best", root_of(run)).label == f"first@{wanted}"


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("first@7", "run 'first' has no checkpoint of step 7: there are 0, 1, 2"),
        ("first@newest", "first@newest names no step: give one of 0, 1, 2, 'latest' or 'best'"),
        ("frist@1", "no run 'frist': .*, did you mean 'first'?"),
        ("first", "'first' is a run and no checkpoint: say how far, as first@latest"),
        ("nowhere", "checkpoint 'nowhere' does not exist"),
        ("first@٢", "first@٢ names no step: give one of 0, 1, 2, 'latest' or 'best'"),
        ("package:", "model 'package:' names no package: give the name of an installed one"),
        ("package:nowhere", "names package 'nowhere', which is not installed"),
    ],
)
def test_an_unknown_checkpoint_is_refused_with_what_there_is(run: RunFolder, name: str, sentence: str) -> None:
    with pytest.raises((LookupError, ValueError), match=sentence):
        find_weights(name, root_of(run))


def test_a_folder_of_a_run_and_an_evaluation_are_no_checkpoints(run: RunFolder, full: dict[str, Any]) -> None:
    for place in (run.uri, f"{run.uri}/checkpoints/"):
        with pytest.raises(LookupError, match="is a run and no checkpoint: say how far, as first@latest"):
            find_weights(place, root_of(run))
    for name in ("full", "full@latest", "full@0", full["folder"]):
        with pytest.raises(
            ValueError, match="'full' is an evaluation of first@1 and has no checkpoints .*: give first@1"
        ):
            find_weights(name, root_of(run))


def test_mlflow_shows_scores_with_the_checkpoint_and_its_data_set(run: RunFolder, evaluated: Evaluate) -> None:
    from mlflow.tracking import MlflowClient

    evaluated("first@2", "tracked", evals=[some(run)], overrides=("tracking.enabled=true",))
    client = MlflowClient(f"sqlite:///{root_of(run)}/mlflow.db")
    experiment = client.get_experiment_by_name("milepost").experiment_id
    (model,) = client.search_logged_models([experiment])
    scores = {metric.key: metric for metric in client.get_logged_model(model.model_id).metrics}
    assert model.tags["milepost.weights_version"] == manifest.load(run, 1).version_out
    assert scores["eval/held-out/mean"].dataset_name == "held-out"
