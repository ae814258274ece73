"""How runs stand, read from folders: states by the lease, tables and details, and what is said of bad ones."""

import contextlib
import json
import logging
import os
import time
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.states import Cancelling, Crashed, Suspended
from rich.console import Console, RenderableType

from milepost.flows.claim import queued
from milepost.flows.failure import RunFailed
from milepost.flows.log_view import chosen
from milepost.flows.progress import say
from milepost.flows.run_detail import run_detail, stage_progress
from milepost.flows.run_logs import logged
from milepost.flows.run_status import PAUSED, RunStatus, all_statuses, finished_count, run_status
from milepost.flows.status_view import LESSER_OF_STEPS, detail_view, fitting, status_table
from milepost.storage import attempts, files, lease, manifest
from milepost.storage.evaluated import Evaluated
from milepost.storage.journal import Slot, StepStore
from milepost.storage.lease import Lease, hold
from milepost.storage.manifest import StepManifest
from milepost.storage.process_logs import log_handler
from milepost.storage.runs import RunFolder
from milepost.storage.schema import ROLLOUTS, from_rows
from milepost.storage.stages import Course
from milepost.tasks.eval_scores import SetScore

from .bench.made_run import MadeRun, add_step, begin_run
from .test_cli import milepost, refused


@flow
def work() -> None:
    """Whatever a page shows."""


@pytest.fixture
def made(tmp_path: Path) -> MadeRun:
    run = begin_run(str(tmp_path))
    for step in range(3):
        add_step(run, step)
    return run


def planned(made: MadeRun, steps: int) -> None:
    attempts.begin(made.folder, made.parameters, steps=steps)


def printed(view: RenderableType, width: int) -> list[str]:
    console = Console(width=width, soft_wrap=True)
    with console.capture() as shown:
        console.print(view)
    return shown.get().splitlines()


def silent(made: MadeRun, held: Lease) -> None:
    """As if the owner of the run had ended without a word."""
    held._stopped.set()
    beat = files.join(made.folder.uri, "lease", f"{held.fence:06d}.beat")
    files.publish_json(beat, {"time": time.time() - 2 * lease.EXPIRY_SECONDS}, overwrite=True)


def test_a_run_that_nobody_works_on_is_stopped_or_finished(made: MadeRun) -> None:
    assert run_status(made.folder).state == "stopped"
    planned(made, 3)
    found = run_status(made.folder)
    assert (found.state, found.done, found.steps) == ("finished", 3, 3)
    assert found.committed_at is not None and abs(found.committed_at - time.time()) < 60


def test_a_run_that_is_held_is_running_and_has_an_end_in_sight(made: MadeRun) -> None:
    with hold(made.folder):
        found = run_status(made.folder)
        assert found.state == "running" and found.step_seconds is not None
        assert found.eta_seconds == pytest.approx(97 * found.step_seconds)
    assert run_status(made.folder).state == "stopped"


def test_a_run_that_waits_for_its_turn_is_queued_and_one_that_was_paused_on_its_page_is_paused(made: MadeRun) -> None:
    with hold(made.folder) as held:
        with queued(made.folder, held.fence):
            assert run_status(made.folder).state == "queued"
        assert run_status(made.folder).state == "running"
        lease.note(made.folder.uri, held.fence, PAUSED)
    assert run_detail(made.folder, "root").places["go on with"] == "milepost resume made --root root"
    assert run_status(made.folder).state == "paused"
    with hold(made.folder):
        assert run_status(made.folder).state == "running"


def test_a_run_whose_process_was_killed_when_it_had_been_paused_is_paused(made: MadeRun) -> None:
    with hold(made.folder) as held:
        silent(made, held)
        assert run_status(made.folder).state == "crashed"
        lease.note(made.folder.uri, held.fence, PAUSED)
        assert run_status(made.folder).state == "paused"


@pytest.mark.slow
def test_what_became_of_a_paused_run_on_its_page_is_its_state(
    made: MadeRun, prefect_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", prefect_server)
    with get_client(sync_client=True) as client, hold(made.folder) as held:
        shown = [client.create_flow_run(work, state=Suspended()).id for _ in range(3)]

        def state(shown_as: UUID, api: str = prefect_server) -> str:
            lease.note(made.folder.uri, held.fence, PAUSED, flow_run=str(shown_as), api=api)
            silent(made, held)
            return run_status(made.folder).state

        assert {state(shown_as) for shown_as in shown} == {"paused"}
        client.set_flow_run_state(shown[0], Cancelling())
        client.set_flow_run_state(shown[1], Crashed(), force=True)
        client.delete_flow_run(shown[2])
        assert [state(shown_as) for shown_as in shown] == ["cancelled", "crashed", "stopped"]
        assert {state(shown_as, "http://127.0.0.1:9/api") for shown_as in shown} == {"paused"}
        assert status_table(all_statuses(str(Path(made.folder.uri).parent)))


def test_a_run_whose_owner_is_silent_has_crashed(made: MadeRun) -> None:
    with hold(made.folder) as held:
        silent(made, held)
        assert run_status(made.folder).state == "crashed"


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 8, 9])
def test_finished_steps_are_counted_without_looking_at_each(tmp_path: Path, count: int) -> None:
    made = begin_run(str(tmp_path))
    for step in range(count):
        files.publish(made.folder.manifest(step), b"{}")
    assert finished_count(made.folder) == count


def test_one_bad_run_hides_no_other(made: MadeRun, tmp_path: Path) -> None:
    record = json.loads(Path(made.folder.record).read_text())
    for name, text in (("newer", json.dumps(record | {"schema_version": 99})), ("torn", '{"steps": ')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(text)
    (tmp_path / "no-run").mkdir()
    found = {status.run: status for status in all_statuses(str(tmp_path))}
    assert {name: status.state for name, status in found.items()} == {
        "made": "stopped",
        "newer": "unreadable",
        "torn": "unreadable",
    }
    assert "schema version 99" in found["newer"].problem
    assert status_table(list(found.values()))


def test_the_open_step_tells_how_far_each_stage_is(made: MadeRun) -> None:
    store = StepStore(made.folder.step(3), "made", 3)
    for slot in (Slot("sample"), Slot("generate", 0, 0), Slot("generate", 0, 1), Slot("score", 0, 1)):
        store.commit(slot, store.key(slot, [], {}), {}, started=time.monotonic())
    found = stage_progress(made.folder, 3, 2)
    assert found["sample"] == (1, 1) and found["generate"] == (2, 2) and found["score"] == (1, 2)
    assert found["filter"] == (0, 2) and found["optimize"] == (0, 1)
    assert run_detail(made.folder, "root").stages == found


def test_a_run_that_does_not_train_has_no_stage_for_that(made: MadeRun) -> None:
    store = StepStore(made.folder.step(3), "made", 3)
    store.commit(Slot("sample"), store.key(Slot("sample"), [], {}), {}, started=time.monotonic())
    assert list(stage_progress(made.folder, 3, 2, Course(last="filter"))) == ["sample", "generate", "score", "filter"]


@pytest.fixture
def evaluation(tmp_path: Path) -> RunFolder:
    """One of 12 prompts with 64 samples each, in 3 parts, of which none is scored."""
    folder = begin_run(str(tmp_path)).folder
    content = json.loads(Path(folder.record).read_text())
    content["data"] |= Evaluated("first@4", "").entry()
    content["steps"] = 1
    content["parameters"]["eval"]["sets"] = [{"name": "d", "path": "d", "n_samples_per_prompt": 64}]
    Path(folder.record).write_text(json.dumps(content))
    return folder


def commit(folder: RunFolder, slot: Slot, record: dict[str, Any] | None = None) -> None:
    store, rows = StepStore(folder.step(0), folder.run_id, 0), from_rows([], ROLLOUTS)
    tables = {"rollouts": store.write(str(slot), rows, ROLLOUTS)}
    store.commit(slot, store.key(slot, [], {}), tables, record=record, started=time.monotonic())


def test_an_evaluation_shows_its_parts_and_then_its_scores(evaluation: RunFolder) -> None:
    commit(evaluation, Slot("score", 0, 1))
    lines = printed(detail_view(run_detail(evaluation, "root")), 80)
    assert "evaluation of first@4, 1 of 3 parts" in lines[0] and [line.split() for line in lines[2:4]] == [
        ["set", "parts"],
        ["d", "1/3"],
    ]
    commit(evaluation, Slot("evaluate"), vars(SetScore("d", 0.25, 0.2, 0.3, 12, 12, 768, 0, 0, 9, 9, 64, 1, {}, None)))
    manifest.publish(evaluation, StepManifest("made", 0, "", "4-aa", "4-aa", "", {}, [], {}, {}, attempt=1))
    lines = printed(detail_view(run_detail(evaluation, "root")), 80)
    assert lines[0].startswith("made  finished  evaluation of first@4, last commit")
    assert lines[3].split("  ")[0] == "d" and "0.2500  0.2000 to 0.3000" in lines[3] and "12 x 64" in lines[3]
    assert run_status(evaluation).accuracy == 0.25


def test_a_run_in_detail_has_its_steps_and_says_how_to_go_on(made: MadeRun, tmp_path: Path) -> None:
    found = run_detail(made.folder, str(tmp_path))
    assert [row["step"] for row in found.rows] == ["2", "1", "0"]
    assert found.places["go on with"] == f"milepost resume made --root {tmp_path}"
    told = json.loads(json.dumps(found.as_json()))
    assert told["done"] == 3 and [step["step"] for step in told["last_steps"]] == [0, 1, 2]
    assert detail_view(found)


def test_logs_are_chosen_by_level_and_process(made: MadeRun) -> None:
    for name in ("train-0", "router"):
        handler = log_handler(f"{made.folder.logs}/{name}.log")
        log = logging.Logger("milepost.tests")
        log.addHandler(handler)
        log.info("well")
        log.warning("unwell")
        handler.close()

    def messages(**wanted: str) -> list[str]:
        asked = {"process": "", "level": "info"} | wanted
        return [entry.message for entry in chosen(made.folder, follow=False, **asked)]

    assert sorted(messages()) == ["unwell", "unwell", "well", "well"]
    assert messages(process="router", level="warning") == ["unwell"]
    with pytest.raises(LookupError, match="'rooter' has logged, did you mean 'router'"):
        messages(process="rooter")
    with pytest.raises(ValueError, match="level 'loud' is none of debug, info, warning, error"):
        messages(level="loud")


def test_where_logs_of_a_run_may_be_is_said_of_a_workspace_alone(made: MadeRun) -> None:
    def said(folder: RunFolder) -> str:
        with pytest.raises(LookupError) as refused:
            list(chosen(folder, process="", level="info", follow=False))
        return str(refused.value)

    assert said(made.folder) == "run 'made' is stopped and has logged nothing yet: `milepost status made` shows more"
    with hold(made.folder) as held, queued(made.folder, held.fence):
        assert "it waits for its turn on the engines" in said(made.folder)
    elsewhere = RunFolder("memory://runs/made", "made")
    files.publish(elsewhere.record, Path(made.folder.record).read_bytes())
    assert "set MILEPOST_WORKSPACE as it was for the run" in said(elsewhere)


def test_following_a_run_that_has_ended_ends(made: MadeRun) -> None:
    assert list(chosen(made.folder, process="", level="info", follow=True)) == []


def test_a_status_without_a_run_is_refused_in_a_sentence(made: MadeRun, tmp_path: Path) -> None:
    refused(milepost("status", "maid", "--root", str(tmp_path)), "no run 'maid'", "did you mean 'made'?")
    refused(milepost("logs", "made", "--root", str(tmp_path)), "run 'made' is stopped and has logged nothing yet")
    refused(milepost("status", "--root", made.folder.record), "run.json is no folder", "--root")
    refused(milepost("status", "-w", "--json"), "give one of them")


def test_an_empty_root_is_no_mistake(tmp_path: Path) -> None:
    done = milepost("status", "--root", str(tmp_path))
    assert done.returncode == 0 and "`milepost train` starts one" in done.stdout.replace("\n", " ")
    assert json.loads(milepost("status", "--root", str(tmp_path), "--json").stdout) == {"runs": []}


def test_a_process_whose_worker_was_killed_says_so_when_it_ends() -> None:
    read, write = os.pipe()
    os.close(read)
    with contextlib.suppress(BrokenPipeError), open(write, "w") as nowhere, contextlib.redirect_stderr(nowhere):
        with pytest.raises(RunFailed, match="whoever started this process is gone"):
            say("step 1")


def test_names_are_whole_in_a_narrow_terminal() -> None:
    names = [f"second-at-{step:06d}-e1fc3518" for step in (16, 17)]
    found = [RunStatus(name, "running", 1, 1, 0.5, 0.5, time.time() - 999, 60.0) for name in names]
    lines = printed(status_table(found, 80), 80)
    assert [line.split()[0] for line in lines] == ["run", *names] and max(map(len, lines)) <= 80
    assert all("0.500" in line and "a step" not in line for line in lines[1:])
    assert "x" * 100 in printed(status_table([RunStatus("x" * 100, "stopped")], 80), 80)[1]


def test_numbers_of_steps_are_whole_in_a_narrow_terminal() -> None:
    row = {"step": "3", **{name: "1,234.56789" for name in LESSER_OF_STEPS}}
    assert fitting([row], 60, LESSER_OF_STEPS) == ["step", *LESSER_OF_STEPS[-4:]]
    assert fitting([row], 200, LESSER_OF_STEPS) == list(row)


def test_an_eta_is_only_for_a_run_that_goes_on() -> None:
    assert RunStatus("r", "running", 1, 3, step_seconds=2.0).eta_seconds == 4.0
    assert RunStatus("r", "stopped", 1, 3, step_seconds=2.0).eta_seconds is None


def test_what_ends_a_run_is_the_last_that_its_log_has(made: MadeRun) -> None:
    with pytest.raises(ValueError, match="no such weights"), logged(made.folder, ""):
        raise ValueError("no such weights")
    (last,) = chosen(made.folder, process="flow", level="error", follow=False)
    assert "the run stops" in last.message and "no such weights" in last.message
    found = run_detail(made.folder, "root")
    assert "no such weights" in found.stopped_by and f"stopped: {found.stopped_by}" in printed(detail_view(found), 200)
    with hold(made.folder):
        pass
    assert run_detail(made.folder, "root").stopped_by == "", "another attempt was made since"
    with logged(made.folder, ""):
        assert logging.getLogger("milepost").level == logging.INFO
    assert logging.getLogger("milepost").level == logging.NOTSET
