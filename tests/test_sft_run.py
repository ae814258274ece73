"""A fine-tuning is a run folder: it is watched, verified and asked as others are, and its name is taken."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from milepost.flows.checkpoint import find_weights
from milepost.flows.lineage import answer
from milepost.flows.log_view import chosen
from milepost.flows.report import write_report
from milepost.flows.run_detail import run_detail
from milepost.flows.run_status import run_status
from milepost.flows.sample_view import find_sample, show_sample
from milepost.flows.sft import sft
from milepost.flows.sql import as_rows, query
from milepost.flows.start import require_resumable
from milepost.flows.step_range import require_steps
from milepost.storage import files, manifest, runs, taught
from milepost.storage.ancestry import Ancestry
from milepost.storage.parameters import EnginesSection, ModelSection, TrackingSection
from milepost.storage.runs import RunFolder
from milepost.storage.sft_rows import SftDataSection
from milepost.storage.verify import verify

from .bench.made_run import make_run

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect_server", "ray_cluster")]


def teach(root: Path, model_dir: str, *, seed: int = 0) -> dict[str, Any]:
    """Ten rows, four at a time."""
    rows = root / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{n}+1=", "response": str(n + 1)}) + "\n" for n in range(10)))
    data = SftDataSection(path=str(rows), batch_size=4, apply_chat_template=False, seed=seed)
    model, engines = ModelSection(path=model_dir, context_length=32), EnginesSection(train="fake")
    tracking = TrackingSection(enabled=False)
    return asyncio.run(sft(run="taught", root=str(root), data=data, model=model, engines=engines, tracking=tracking))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, model_dir: str) -> RunFolder:
    root = tmp_path_factory.mktemp("runs")
    teach(root, model_dir)
    return runs.run_folder(str(root), "taught")


def test_it_is_watched_as_a_run_with_a_step_for_each_batch(folder: RunFolder) -> None:
    found = run_detail(folder, "root")
    assert (found.status.state, found.status.done, found.status.steps) == ("finished", 3, 3)
    assert [row["step"] for row in found.rows] == ["2", "1", "0"] and "loss" in found.rows[0]
    assert found.places["model"] == f"{folder.uri}/model" and found.stages == {}
    told = [entry.message for entry in chosen(folder, process="flow", level="info", follow=False)]
    assert any(message.startswith("3 of 3 steps, loss") for message in told)


def test_it_is_verified_and_has_a_report(folder: RunFolder) -> None:
    found = verify(folder)
    assert (found.faults, found.notes, found.steps, found.samples) == ([], [], 3, 10)
    assert "<figcaption>loss" in Path(write_report(folder)).read_text()


def test_its_lineage_ends_in_its_model_which_can_be_evaluated(folder: RunFolder) -> None:
    root = folder.uri.rpartition("/")[0]
    found = answer("checkpoint:taught@latest", root)
    assert isinstance(found, Ancestry) and found.version.startswith("3-") and found.state == "complete"
    assert found.uri == find_weights("taught@latest", root).model_dir == find_weights("taught@3", root).model_dir
    with pytest.raises(LookupError, match="keeps the model of its last step: give taught@3"):
        find_weights("taught@2", root)


def test_what_it_learnt_is_found_by_row_and_by_prompt(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    root = folder.uri.rpartition("/")[0]
    asked = "select file, row, prompt, response, prompt_id, sample_id, step from learnt where row = 7"
    ((file, row, prompt, response, prompt_id, sample_id, step),) = as_rows(query([folder], asked))[1]
    assert (file, row, prompt, response) == (f"{root}/rows.jsonl", 7, '"7+1="', "8")
    (touch,) = answer(f"prompt:{prompt_id}", root).runs
    assert (touch.served, touch.trained, touch.samples) == ([step], [step], [sample_id])
    assert touch.checkpoints == [f"{folder.uri}/model"]
    shown = find_sample(root, "taught", sample_id)
    assert shown["learnt_from"] == f"row 7 of {file}" and shown["rollout_logprobs"] is None
    show_sample(shown)
    told = capsys.readouterr().out
    assert "row 7 of" in told and "verdict" not in told


def test_its_model_is_traced_to_every_row_and_so_is_a_run_that_began_with_it(folder: RunFolder) -> None:
    root = folder.uri.rpartition("/")[0]
    found = answer("checkpoint:taught@latest", root)
    assert sorted(item.row for item in found.prompts) == list(range(10))
    assert [len(answer(f"checkpoint:taught@{step}", root).prompts) for step in (1, 2, 3)] == [4, 8, 10]
    child = make_run(f"{root}/elsewhere", 1).folder
    shutil.move(child.uri, f"{root}/made")
    record = json.loads(Path(root, "made", "run.json").read_text())
    record["model"]["folder"] = f"{folder.uri}/model"
    Path(root, "made", "run.json").write_text(json.dumps(record))
    behind = answer("checkpoint:made@1", root).parent
    assert (behind.run, behind.prompts) == ("taught", found.prompts)
    touched = {touch.run: touch for touch in answer(f"prompt:{found.prompts[0].prompt_id}", root).runs}
    assert touched["made"].parent == "taught@3" and touched["made"].checkpoints == [f"{root}/made/checkpoints/000001"]


def test_its_name_is_taken_and_it_is_no_run_with_samples(folder: RunFolder, model_dir: str) -> None:
    with pytest.raises(FileExistsError, match="'taught' already exists"):
        teach(Path(folder.uri).parent, model_dir)
    for refuse in (lambda: require_resumable(folder, None), lambda: require_steps(folder)):
        with pytest.raises(ValueError, match="'taught' is a supervised fine-tuning, which has no samples"):
            refuse()


def test_one_that_was_stopped_goes_on_as_it_was_begun_and_in_no_other_way(tmp_path: Path, model_dir: str) -> None:
    teach(tmp_path, model_dir)
    folder = runs.run_folder(str(tmp_path), "taught")
    before = [files.read(folder.manifest(step)) for step in range(3)]
    Path(folder.manifest(2)).unlink()
    Path(folder.uri, taught.SFT_RECORD).unlink()
    assert run_status(folder).state == "stopped" and "once more" in verify(folder).notes[0]
    with pytest.raises(ValueError, match="was begun with data.seed 0, now it is 1"):
        teach(tmp_path, model_dir, seed=1)
    teach(tmp_path, model_dir)
    assert [files.read(folder.manifest(step)) for step in range(2)] == before[:2]
    assert manifest.finished_steps(folder) == [0, 1, 2] and not verify(folder).faults
