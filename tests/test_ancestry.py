"""Where a checkpoint comes from and where a prompt went, read from run folders alone."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from milepost.flows.lineage import Touched, answer, as_json, show
from milepost.flows.lineage_picture import escaped, mermaid
from milepost.storage import files, manifest, runs
from milepost.storage.ancestry import Ancestry, ancestry
from milepost.storage.begun import Origin
from milepost.storage.parent import ParentRun
from milepost.storage.retention import retain
from milepost.storage.runs import RunFolder
from milepost.storage.taught import SFT_RECORD
from milepost.storage.touches import touches

from .bench.made_run import MadeRun, make_run

STEPS = 3


@pytest.fixture
def made(three_steps: MadeRun, tmp_path: Path) -> MadeRun:
    return three_steps.copied(tmp_path)


def child_of(made: MadeRun, name: str, version: int) -> RunFolder:
    """A run of two steps that began with the weights that `made` exported after `version` steps."""
    root = Path(made.folder.uri).parent
    other = make_run(str(root / f"elsewhere-{name}"), 2).folder
    Path(other.uri).rename(root / name)
    folder = runs.run_folder(str(root), name)
    record = json.loads(Path(folder.record).read_text())
    record |= {"run_id": name, "model": record["model"] | {"folder": made.folder.weights(version)}}
    Path(folder.record).write_text(json.dumps(record))
    return folder


def test_a_checkpoint_names_every_step_table_and_prompt_behind_it(made: MadeRun) -> None:
    found = ancestry(made.folder, 2)
    closed = [manifest.load(made.folder, step) for step in range(2)]
    assert [step.manifest for step in found.steps] == [manifest.manifest_digest(made.folder, step) for step in range(2)]
    tables = [ref["digest"] for step in closed for entry in step.commits for ref in entry["tables"].values()]
    assert [table.digest for step in found.steps for table in step.tables] == tables
    assert sum(len(prompt.steps) for prompt in found.prompts) == sum(step.accounting["served"] for step in closed)
    assert found.version == closed[-1].version_out
    assert found.attempts[0].parameters_digest == runs.load(made.folder).parameters_digest


def test_the_ancestry_of_a_checkpoint_goes_on_in_the_run_that_its_run_began_from(made: MadeRun) -> None:
    child = child_of(made, "child", 2)
    parent = ancestry(child, 1).parent
    assert isinstance(parent, Ancestry)
    assert (parent.run, len(parent.steps)) == ("made", 2)
    assert isinstance(parent.parent, Origin) and parent.parent.kind == "model"


def test_weights_of_supervised_fine_tuning_carry_its_record(made: MadeRun, tmp_path: Path) -> None:
    tuned = tmp_path / "tuned" / "model"
    tuned.mkdir(parents=True)
    (tuned.parent / SFT_RECORD).write_text(json.dumps({"model": "tiny", "steps": 7}))
    record = json.loads(Path(made.folder.record).read_text())
    record["model"]["folder"] = str(tuned)
    Path(made.folder.record).write_text(json.dumps(record))
    assert ancestry(made.folder, 1).parent == Origin("sft", str(tuned), {"model": "tiny", "steps": 7})


def test_a_checkpoint_that_was_removed_is_still_traced(made: MadeRun) -> None:
    files.remove_folder(made.folder.checkpoint(1))
    found = ancestry(made.folder, 1)
    assert found.state != "complete"
    assert len(found.steps) == 1


def test_a_checkpoint_that_retention_removed_is_said_to_be_and_which_are_there(made: MadeRun) -> None:
    assert retain(made.folder, keep_last=2) == [1]
    by = "checkpoint.keep_last and checkpoint.keep_every"
    assert ancestry(made.folder, 1).state == f"saved by step 0 and removed since by {by}; still there: 2, 3"


@pytest.mark.parametrize("version", [0, 4, 99])
def test_a_version_that_the_run_never_had_is_refused(made: MadeRun, version: int) -> None:
    with pytest.raises(LookupError, match=f"no checkpoint {version}: its last is 3"):
        ancestry(made.folder, version)


def test_a_prompt_names_every_step_and_checkpoint_that_it_touched(made: MadeRun) -> None:
    prompt = ancestry(made.folder, STEPS).prompts[0]
    (found,) = touches(str(Path(made.folder.uri).parent), "prompt", prompt.prompt_id)
    assert found.served == prompt.steps
    assert len(found.samples) == 2 * len(prompt.steps)
    assert set(found.trained) <= set(found.served)
    first = found.trained[0]
    assert found.checkpoints == [made.folder.checkpoint(number) for number in (1, 2, 3) if number > first]


def test_a_run_that_began_with_touched_weights_has_the_prompt_too(made: MadeRun) -> None:
    late = next(item for item in ancestry(made.folder, STEPS).prompts if item.steps == [2])
    child_of(made, "after", 3)
    child_of(made, "before", 1)
    root = str(Path(made.folder.uri).parent)
    found = {touch.run: touch for touch in touches(root, "prompt", late.prompt_id)}
    trained = bool(found["made"].trained)
    inherited = {name for name, touch in found.items() if touch.inherited}
    assert inherited == ({"after"} if trained else set())


def test_a_sample_is_traced_like_a_prompt(made: MadeRun) -> None:
    root = str(Path(made.folder.uri).parent)
    (found,) = touches(root, "sample", "000001-0-0000-000")
    assert (found.served, found.samples) == ([1], ["000001-0-0000-000"])


def test_samples_of_one_id_in_several_runs_are_said_to_be_different_and_one_is_asked_for_by_its_run(
    made: MadeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    root, name = str(Path(made.folder.uri).parent), "000001-0-0000-000"
    child_of(made, "other", 1)
    show(answer(f"sample:{name}", root))
    assert f"ask for one as sample:made/{name}" in " ".join(capsys.readouterr().out.split())
    found = answer(f"sample:made/{name}", root)
    assert isinstance(found, Touched) and found.note == "" and [touch.run for touch in found.runs] == ["made"]
    with pytest.raises(LookupError, match="run 'made' has no sample '000009-0-0000-000', did you mean"):
        answer("sample:made/000009-0-0000-000", root)


def test_a_sample_of_a_run_is_looked_for_in_those_that_took_its_stages_as_well(made: MadeRun) -> None:
    child = child_of(made, "child", 2)
    record = json.loads(Path(child.record).read_text())
    record["data"] |= ParentRun("made", 0, "train").entry()
    Path(child.record).write_text(json.dumps(record))
    root = str(Path(made.folder.uri).parent)
    assert {touch.run for touch in touches(root, "sample", "000001-0-0000-000", run="child")} == {"made", "child"}


def test_what_nobody_had_is_refused(made: MadeRun) -> None:
    with pytest.raises(LookupError, match="no run in .* has a prompt 'nothing'"):
        touches(str(Path(made.folder.uri).parent), "prompt", "nothing")


@pytest.mark.parametrize("what", ["made", "checkpoint:made", "checkpoint:made@x", "prompt:", "run:made"])
def test_a_question_of_another_form_is_refused(made: MadeRun, what: str) -> None:
    with pytest.raises(ValueError, match="give checkpoint:RUN@STEP, .*, prompt:ID, sample:ID or sample:RUN/ID"):
        answer(what, str(Path(made.folder.uri).parent))


def test_the_answer_is_a_tree_a_picture_and_json(made: MadeRun, capsys: pytest.CaptureFixture[str]) -> None:
    root = str(Path(made.folder.uri).parent)
    for what in ("checkpoint:made@3", "sample:000001-0-0000-000"):
        found = answer(what, root)
        show(found)
        assert "made" in capsys.readouterr().out
        assert json.loads(json.dumps(as_json(found)))
        assert mermaid(found).startswith("flowchart TD\n")


def test_the_picture_has_a_box_a_run_and_the_steps_of_each_attempt_in_one_node(made: MadeRun) -> None:
    child_of(made, "child", 2)
    drawn = mermaid(answer("checkpoint:child@1", str(Path(made.folder.uri).parent)))
    assert [line.strip().partition("[")[2] for line in drawn.splitlines() if "subgraph" in line] == [
        '"run made"]',
        '"run child"]',
    ]
    assert "steps 0 to 1<br/>commit unknown" in drawn and "step 0<br/>commit unknown" in drawn
    assert drawn.index('"run made"') < drawn.index("made@2<br/>") < drawn.index('"run child"')


def test_text_in_a_picture_cannot_end_its_node() -> None:
    assert escaped('a"]#<b>`') == "a#quot;]#35;#lt;b#gt;#96;"


def test_lineage_needs_no_prefect_ray_or_mlflow() -> None:
    code = "import sys, milepost.flows.lineage; print([n for n in ('prefect', 'ray', 'mlflow') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
