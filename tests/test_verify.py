"""A run that is as it was written has no fault; whatever is changed, lost or contradicts itself is named."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from milepost.flows.report import write_report
from milepost.storage import files, manifest, runs
from milepost.storage.accounting import epoch_accounting
from milepost.storage.retention import retain
from milepost.storage.runs import RunFolder
from milepost.storage.verify import Verification, verify
from milepost.storage.verify_tables import RESTORE, Fault

from .bench.made_run import MadeRun, add_step, begin_run, make_run
from .conftest import Prompts
from .test_cli import milepost
from .test_train_fake import parameters, trained

STEPS = 4


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("made")
    make_run(str(root), STEPS)
    return root


@pytest.fixture
def made(stored: Path, tmp_path: Path) -> MadeRun:
    """A copy of a run of four steps, in another place than it was written."""
    shutil.copytree(stored / "made", tmp_path / "made")
    folder = RunFolder(str(tmp_path / "made"), "made")
    record = runs.load(folder)
    return MadeRun(folder, record.parameters, None)


def only(found: Verification) -> Fault:
    (fault,) = found.faults
    return fault


def rewrite(path: str | Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads(Path(path).read_text())
    change(content)
    Path(path).write_text(json.dumps(content))


def test_a_run_that_is_whole_has_no_fault_wherever_it_is(made: MadeRun) -> None:
    found = verify(made.folder)
    assert (found.faults, found.notes) == ([], [])
    assert (found.steps, found.samples, found.checkpoints) == (STEPS, STEPS * 8, STEPS)


def test_a_run_in_memory_is_verified_too() -> None:
    assert verify(make_run("memory://verify", 1).folder).steps == 1


def test_several_processes_find_what_one_does(made: MadeRun) -> None:
    made.table(3, "score-r0-s000").unlink()
    seen: list[int] = []
    found = verify(made.folder, workers=2, advance=seen.append)
    assert (found, seen) == (verify(made.folder), [2, 2])


@pytest.mark.parametrize("name", ["sample", "generate-r0-s001", "score-r0-s000", "filter-r0-s001", "optimize"])
def test_a_flipped_byte_is_found_in_every_table(made: MadeRun, name: str) -> None:
    table = sorted(made.step(2).glob(f"{name}-*.parquet"))[0]
    data = bytearray(table.read_bytes())
    data[len(data) // 2] ^= 1
    table.write_bytes(data)
    fault = only(verify(made.folder))
    assert fault.file == str(table) and "was written" in fault.problem and "copy" in fault.fix


def test_micro_batches_that_lack_a_sample_are_named(made: MadeRun) -> None:
    """Neither a digest nor a manifest covers what a trainer said of them."""
    commit = made.step(2) / "journal" / "optimize-r0.json"
    rewrite(commit, lambda content: content["record"]["results"][1]["micro_batches"].update(rows=[["0 2"]]))
    fault = only(verify(made.folder))
    assert (fault.file, fault.problem) == (str(commit), "micro-batches of batch 1 lack row 1")


def test_a_missing_table_is_named(made: MadeRun) -> None:
    table = made.table(1, "filter-r0-s000")
    table.unlink()
    fault = only(verify(made.folder))
    assert (fault.file, fault.problem) == (str(table), "is missing; 4 rows of rollouts were stored in it")


def test_a_missing_prompt_set_is_named(made: MadeRun) -> None:
    (table,) = Path(made.folder.uri, "prompts").glob("*.parquet")
    table.unlink()
    assert only(verify(made.folder)).file == str(table)


def test_a_changed_manifest_breaks_the_chain(made: MadeRun) -> None:
    rewrite(made.folder.manifest(1), lambda content: content["metrics"].update(reward=1.0))
    fault = only(verify(made.folder))
    assert fault.file == made.folder.manifest(2) and "as the manifest before" in fault.problem


def test_a_missing_manifest_is_named(made: MadeRun) -> None:
    Path(made.folder.manifest(1)).unlink()
    fault = Fault(made.folder.manifest(1), "is missing, and later steps are there", RESTORE)
    assert fault in verify(made.folder).faults


def test_a_missing_step_is_named(made: MadeRun) -> None:
    shutil.rmtree(made.step(1))
    assert made.folder.manifest(1) in {fault.file for fault in verify(made.folder).faults}


def test_a_torn_manifest_is_a_fault_and_no_traceback(made: MadeRun) -> None:
    Path(made.folder.manifest(3)).write_text('{"run_id": ')
    assert "is not JSON" in only(verify(made.folder)).problem


def test_a_manifest_that_lacks_a_field_is_a_fault(made: MadeRun) -> None:
    rewrite(made.folder.manifest(3), lambda content: content.pop("cursor"))
    assert only(verify(made.folder)).problem == "has no 'cursor'"


def test_a_foreign_file_in_a_journal_is_a_fault(made: MadeRun) -> None:
    path = made.step(3) / "journal" / "notes.json"
    path.write_text('{"slot": "notes", "key": "", "tables": {}, "record": {}}')
    assert only(verify(made.folder)).file == str(path)


def test_a_commit_that_differs_from_its_manifest_is_a_fault(made: MadeRun) -> None:
    path = made.step(3) / "journal" / "score-r0-s000.json"
    rewrite(path, lambda content: content.update(key="other"))
    fault = only(verify(made.folder))
    assert fault.file == str(path) and "differs from what the manifest says" in fault.problem


def test_a_commit_from_before_the_run_was_moved_is_no_fault(made: MadeRun) -> None:
    path = made.step(3) / "journal" / "score-r0-s000.json"

    def elsewhere(content: dict[str, Any]) -> None:
        for ref in content["tables"].values():
            ref["uri"] = f"/elsewhere/{Path(ref['uri']).name}"

    rewrite(path, elsewhere)
    assert verify(made.folder).faults == []


def test_a_commit_that_is_gone_is_a_fault(made: MadeRun) -> None:
    path = made.step(3) / "journal" / "score-r0-s000.json"
    path.unlink()
    assert only(verify(made.folder)).file == str(path)


def test_changed_parameters_are_found(made: MadeRun) -> None:
    rewrite(made.folder.record, lambda content: content["parameters"]["optimizer"].update(lr=0.5))
    fault = only(verify(made.folder))
    assert fault.file == made.folder.record and "parameters_digest" in fault.problem


@pytest.mark.parametrize(
    ("accounting", "problem"),
    [({"trained": 4, "served": 4}, "its tables give"), ({"trained": 3, "served": 3}, "'served': 4")],
)
def test_accounting_that_the_tables_do_not_give_is_a_fault(
    made: MadeRun, accounting: dict[str, int], problem: str
) -> None:
    rewrite(made.folder.manifest(3), lambda content: content.update(accounting=accounting))
    fault = only(verify(made.folder))
    assert fault.file == made.folder.manifest(3) and problem in fault.problem


@pytest.mark.parametrize(
    ("changed", "problem"),
    [({"attempt": 7}, "of which nothing is stored"), ({"parameters_digest": "f" * 64}, "have digest")],
)
def test_a_step_of_another_attempt_than_the_run_had_is_a_fault(
    made: MadeRun, changed: dict[str, Any], problem: str
) -> None:
    rewrite(made.folder.manifest(3), lambda content: content.update(changed))
    fault = only(verify(made.folder))
    assert fault.file == made.folder.manifest(3) and problem in fault.problem


def test_a_manifest_from_before_attempts_were_kept_is_no_fault(made: MadeRun) -> None:
    rewrite(made.folder.manifest(3), lambda content: [content.pop(name) for name in ("attempt", "parameters_digest")])
    assert verify(made.folder).faults == [] and manifest.load(made.folder, 3).attempt == 0


def test_a_cursor_that_skips_a_prompt_is_a_fault(made: MadeRun) -> None:
    rewrite(made.folder.manifest(3), lambda content: content["cursor"].update(position=9))
    assert "sampling ended at" in only(verify(made.folder)).problem


def test_versions_that_do_not_follow_each_other_are_a_fault(made: MadeRun) -> None:
    rewrite(made.folder.manifest(3), lambda content: content.update(version_in="3-" + "f" * 32))
    problems = [fault.problem for fault in verify(made.folder).faults]
    assert any("begins with weights 3-ffff" in problem for problem in problems)


WRONG_ROWS = [
    ("generate", {"loss_mask": [1]}, "a loss mask of another length"),
    ("generate", {"loss_mask": [1, 1, 1, 1, 2]}, "a mask beyond 0 and 1"),
    ("generate", {"rollout_logprobs": [-0.5]}, "other than one log-probability"),
    ("generate", {"rollout_logprobs": [-0.5, float("nan"), -0.5, -0.5, -0.5]}, "a log-probability that is not finite"),
    ("generate", {"sample_id": "000000-0-0000-000"}, "is stored more than once"),
    ("generate", {"run_id": "other"}, "is not of run 'made'"),
    ("generate", {"step": 5}, "is not of step 0"),
    ("generate", {"status": "fine"}, "an unknown status"),
    ("generate", {"prompt_id": "other"}, "a prompt that was not served"),
    ("generate", {"weight_version_min": 7}, "stamped with other weights"),
    ("generate", {"weight_version_max": None}, "stamped with other weights"),
    ("generate", {"weights_digest": "0" * 16}, "stamped with other weights"),
    ("score", {"reward": float("inf")}, "a reward that is not finite"),
    ("score", {"response": "other"}, "score changed column 'response'"),
    ("filter", {"reward": 0.25}, "filter changed column 'reward'"),
    ("filter", {"kept": None}, "is neither kept nor dropped"),
    ("filter", {"kept": False, "drop_reason": None}, "is dropped without a reason"),
    ("optimize", {"advantages": None}, "other than one number for each token in advantages"),
    ("optimize", {"old_logprobs": [0.0]}, "other than one number for each token in old_logprobs"),
    ("optimize", {"advantages": [float("inf")] * 5}, "a number in advantages that is not finite"),
    ("optimize", {"ref_logprobs": [0.0]}, "other than one number for each token in ref_logprobs"),
    ("optimize", {"reward": 9.0}, "optimize changed column 'reward'"),
    ("optimize", {"sample_id": "000000-0-0000-000"}, "is trained more than once"),
    ("optimize", {"sample_id": "else"}, "is trained and was not kept"),
]


@pytest.mark.parametrize(("stage", "values", "problem"), WRONG_ROWS)
def test_rows_that_were_written_wrong_are_named(
    tmp_path: Path, stage: str, values: dict[str, Any], problem: str
) -> None:
    made = begin_run(str(tmp_path))
    add_step(made, 0, **{stage: values})
    found = [fault for fault in verify(made.folder).faults if problem in fault.problem]
    assert found and found[0].file.startswith(str(made.step(0)))


def test_a_group_of_another_size_is_a_fault(made: MadeRun) -> None:
    """Every digest is right, but the run was to draw four samples of each prompt."""

    def change(content: dict[str, Any]) -> None:
        content["parameters"]["data"]["n_samples_per_prompt"] = 4
        content["parameters_digest"] = files.digest_of(files.canonical_json(content["parameters"]).encode())

    rewrite(made.folder.record, change)
    assert "group 000000-0-0000 has 2 samples, 4 were asked for (and 3 more groups)" in {
        fault.problem for fault in verify(made.folder).faults
    }


def test_another_order_of_prompts_is_a_fault(made: MadeRun) -> None:
    def change(content: dict[str, Any]) -> None:
        content["parameters"]["data"]["seed"] = 8
        content["parameters_digest"] = files.digest_of(files.canonical_json(content["parameters"]).encode())

    rewrite(made.folder.record, change)
    assert any("was due" in fault.problem for fault in verify(made.folder).faults)


def test_a_last_step_that_is_not_finished_is_no_fault(made: MadeRun) -> None:
    Path(made.folder.manifest(3)).unlink()
    for name in ("optimize-r0", "filter-r0-s001", "score-r0-s001"):
        (made.step(3) / "journal" / f"{name}.json").unlink()
    found = verify(made.folder)
    assert found.faults == []
    assert found.notes[0].startswith("step 3 is not finished") and "4 tables are named by no commit" in found.notes[1]


def test_tables_that_went_to_the_trainer_and_back_are_no_leftovers(made: MadeRun) -> None:
    for name in ("for-policy", "logprobs-policy", "for-critic", "values"):
        (made.step(2) / f"{name}-0123456789ab.parquet").write_bytes(b"")
    assert verify(made.folder).notes == []


def test_an_unfinished_step_is_checked_as_far_as_it_went(made: MadeRun) -> None:
    Path(made.folder.manifest(3)).unlink()
    made.table(3, "generate-r0-s001").unlink()
    assert "is missing" in only(verify(made.folder)).problem


def test_a_damaged_checkpoint_is_a_fault(made: MadeRun) -> None:
    Path(made.folder.checkpoint(2), "state.json").write_text("{}")
    fault = only(verify(made.folder))
    assert fault.file == made.folder.checkpoint(2) and "state.json" in fault.problem


def test_a_checkpoint_that_is_gone_is_a_fault(made: MadeRun) -> None:
    shutil.rmtree(made.folder.checkpoint(4))
    assert only(verify(made.folder)).file == made.folder.checkpoint(4)


def test_a_checkpoint_that_retention_removed_is_no_fault(made: MadeRun) -> None:
    retain(made.folder, keep_last=1)
    found = verify(made.folder)
    assert found.faults == [] and found.notes[0].startswith("3 checkpoints were removed")


def test_a_checkpoint_of_other_weights_is_a_fault(made: MadeRun) -> None:
    closed = manifest.load(made.folder, 3)
    rewrite(made.folder.manifest(3), lambda content: content.update(version_out="4-" + "e" * 32))
    assert f"holds weights {closed.version_out}" in only(verify(made.folder)).problem


def test_an_unknown_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LookupError, match="no run 'absent'"):
        verify(runs.run_folder(str(tmp_path), "absent"))


@pytest.mark.slow
def test_the_command_lists_faults_and_exits_with_three(made: MadeRun) -> None:
    root = str(Path(made.folder.uri).parent)
    assert milepost("verify", "made", "--root", root).returncode == 0
    table = made.table(1, "filter-r0-s000")
    table.unlink()
    done = milepost("verify", "made", "--root", root)
    assert done.returncode == 3 and str(table) in done.stdout and "Traceback" not in done.stderr
    listed = milepost("verify", "made", "--root", root, "--json")
    assert listed.returncode == 3
    assert [fault["file"] for fault in json.loads(listed.stdout)["faults"]] == [str(table)]


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_server", "ray_cluster")
def test_a_run_of_the_whole_dag_has_no_fault_and_reports_its_epochs(
    tmp_path: Path, model_dir: str, prompts: Prompts
) -> None:
    """Twelve prompts, eight a round: rounds, steps and epochs do not end together."""
    rounds = ['filter.group="nonzero_std"', "filter.max_rounds=2", "checkpoint.every_steps=1"]
    chosen = parameters(model_dir, prompts(12), *rounds, f"eval.path={prompts(4, name='held.jsonl')}")
    folder = trained("whole", tmp_path, chosen, steps=3)
    found = verify(folder)
    assert (found.faults, found.steps) == ([], 3) and found.checkpoints
    assert set(epoch_accounting(folder)) >= {("", 0), ("", 1)}
    assert "how each of them ended" in files.read(write_report(folder)).decode()
