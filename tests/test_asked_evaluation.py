"""Evaluations on the engines of a run that trains: asked for through its folder, answered between two steps."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from milepost.flows.evaluate import evaluate
from milepost.flows.evaluation_results import scored
from milepost.flows.sharing import plan_shared
from milepost.flows.train import train
from milepost.storage import asked, attempts, files, manifest, runs
from milepost.storage.evaluated import evaluated
from milepost.storage.parameters import EvalSet, Parameters
from milepost.storage.runs import RunFolder
from milepost.storage.tables import read_table
from milepost.storage.verify import verify

from .sums import write_sums
from .test_train_fake import parameters, sections

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect_server", "ray_cluster")]


@dataclass
class Shared:
    """A run of three steps that was asked for evaluations when two were done, and what one of them came to."""

    folder: RunFolder
    sets: list[EvalSet]
    found: dict[str, Any]

    @property
    def root(self) -> str:
        return self.folder.uri.rpartition("/")[0]

    def beside(self, name: str) -> RunFolder:
        return runs.run_folder(self.root, name)


async def until(condition: Any) -> None:
    async with asyncio.timeout(120):
        while not condition():
            await asyncio.sleep(0.1)


async def trained_and_asked(folder: RunFolder, chosen: Parameters, sets: list[EvalSet], waiting: Path) -> Any:
    """While the evaluation of the weights after two steps waits, three others are asked for, and one asker leaves."""
    root = folder.uri.rpartition("/")[0]
    training = asyncio.create_task(train(run="first", root=root, steps=3, **sections(chosen)))
    await until(lambda: len(manifest.finished_steps(folder)) == 2)
    wanted = {"checkpoint": "", "root": root, "evals": sets, "engines_of": "first"}
    asking, leaving = (asyncio.create_task(evaluate(run=name, **wanted)) for name in ("shared", "left"))
    await until(lambda: {"left.json", "shared.json"} <= set(files.names(files.join(folder.uri, "asked"))))
    leaving.cancel()
    found = plan_shared("first", "first@latest", "other", root, sets=sets)
    asked.ask(folder, "first", found.parameters, found.prompts)  # the name of the run itself, which is at work
    waiting.unlink()
    await training
    return await asking


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, model_dir: str, prefect_server: str, ray_cluster: None) -> Shared:
    base = tmp_path_factory.mktemp("asked")
    folder, waiting = runs.run_folder(str(base / "runs"), "first"), base / "waiting"
    waiting.touch()
    held_out = write_sums(base / "held-out.jsonl", range(16, 26))
    sets = [EvalSet(path=held_out), EvalSet(path=held_out, name="sampled", n_samples_per_prompt=2)]
    own = [f"eval.path={held_out}", "eval.every_steps=2", "checkpoint.every_steps=1"]
    waits = "rollout.function=tests.rewards_for_tests:second_evaluation_waits"
    chosen = parameters(model_dir, write_sums(base / "prompts.jsonl", range(16)), *own, waits)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MILEPOST_TEST_WAIT", str(waiting))
        found = asyncio.run(trained_and_asked(folder, chosen, sets, waiting))
    return Shared(folder, sets, found)


def test_the_answer_is_that_of_an_evaluation_on_engines_of_its_own(shared: Shared) -> None:
    own = asyncio.run(evaluate(checkpoint="first@2", run="own", root=shared.root, evals=shared.sets))
    assert shared.found["weights"] == own["weights"] == manifest.load(shared.folder, 1).version_out
    assert (shared.found["checkpoint"], shared.found["sets"]) == ("first@2", own["sets"])
    for name, item in scored(shared.beside("own")).items():
        table = read_table(scored(shared.beside("shared"))[name].table)
        assert table.drop_columns("run_id").equals(read_table(item.table).drop_columns("run_id"))
    assert verify(shared.beside("shared")).faults == []


def test_the_run_goes_on_and_nothing_of_what_was_asked_stays_in_it(shared: Shared) -> None:
    assert manifest.finished_steps(shared.folder) == [0, 1, 2] and verify(shared.folder).faults == []
    assert files.names(files.join(shared.folder.uri, "asked")) == ["refused"]
    assert "works on" in asked.refused(shared.folder, "first")


def test_an_asker_that_has_gone_finds_the_answer_when_it_asks_again(shared: Shared) -> None:
    of = evaluated(attempts.current(shared.beside("left")))
    assert of is not None and of.version == shared.found["weights"]
    again = {"run": "left", "root": shared.root, "evals": shared.sets, "engines_of": "first"}
    assert asyncio.run(evaluate(checkpoint="", **again))["sets"] == shared.found["sets"]


@pytest.mark.parametrize(
    ("checkpoint", "options", "sentence"),
    [
        ("", {}, "run 'first' is not running and has no engines to share: start it with `milepost resume first --root"),
        ("first@1", {}, "'first@1' is not what the engines of 'first' have, .*: give first@latest, or leave"),
        ("", {"overrides": ("rollout.top_k=2",)}, "as they are: leave --config and --set out, or --engines-of"),
    ],
)
def test_what_a_run_cannot_do_is_refused_before_anything_is_asked(
    shared: Shared, checkpoint: str, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        plan_shared("first", checkpoint, "new", shared.root, sets=shared.sets, **options)
    with pytest.raises(ValueError, match="'shared' has no engines to share between its steps"):
        plan_shared("shared", "", "new", shared.root, sets=shared.sets)
