"""What `resume` refuses, before anything is started: one sentence that names the file, the name or the number."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import cast

import pytest

from milepost.engines.protocols import TrainEngine, UpdateParams
from milepost.flows import cli
from milepost.flows.boundary import require_checkpoint
from milepost.flows.report import write_report
from milepost.flows.sql import as_rows, query
from milepost.flows.start import require_resumable
from milepost.flows.train import resume, train
from milepost.storage import attempts, files, manifest, runs
from milepost.storage.journal import StepStore
from milepost.storage.tables import TableRef
from milepost.storage.verify import verify
from milepost.tasks.recover import replay_step

from .bench.made_run import MadeRun
from .conftest import Prompts
from .test_train_fake import parameters, sections, trained

STEPS = 3
Outcome = tuple[int, str]


@pytest.fixture
def made(three_steps: MadeRun, tmp_path: Path) -> MadeRun:
    """Three finished steps of a hundred, each with a checkpoint."""
    return three_steps.copied(tmp_path)


@pytest.fixture
def ask(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> "Ask":
    return Ask(str(tmp_path), capsys)


class Ask:
    """A command line in this process, on the runs of one root."""

    def __init__(self, root: str, capsys: pytest.CaptureFixture[str]) -> None:
        self.root, self.capsys = root, capsys

    def __call__(self, command: str, run: str, *more: str) -> Outcome:
        given = ["train", "--run", run] if command == "train" else [command, *more, "--", run]
        code = cli._run([given[0], "--root", self.root, *given[1:], *_statement(command)], debug=False)
        return code, self.capsys.readouterr().err

    def refused(self, command: str, run: str, *words: str) -> None:
        code, told = self(command, run)
        assert code == 2, told
        assert told.count("\n") == 1 and told.startswith("milepost: "), told
        for word in words:
            assert word in told


def _statement(command: str) -> list[str]:
    return ["select 1"] if command == "sql" else []


def rewrite(path: str, **changed: object) -> None:
    content = json.loads(Path(path).read_text())
    Path(path).write_text(json.dumps(content | changed))


@pytest.mark.parametrize("command", ["resume", "verify", "report", "sql"])
def test_an_unknown_run_is_named(ask: Ask, command: str) -> None:
    ask.refused(command, "nothing", "no run 'nothing'")


@pytest.mark.parametrize("command", ["train", "resume", "verify", "report", "sql"])
@pytest.mark.parametrize("run", ["", "..", "a/b", "../made", "made/../made", "a\x1b[31m", "a\n", "\u00e9", "x" * 129])
def test_a_name_that_is_no_folder_is_refused_by_every_command(ask: Ask, made: MadeRun, command: str, run: str) -> None:
    ask.refused(command, run, "run name ", "cannot be used")


def test_flows_that_are_called_directly_refuse_a_name_too(tmp_path: Path) -> None:
    for called in (train.fn(run="../x", root=str(tmp_path)), resume.fn(run="../x", root=str(tmp_path))):
        with pytest.raises(ValueError, match=r"run name '\.\./x' cannot be used"):
            asyncio.run(called)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["train", "resume", "verify", "report", "sql"])
def test_a_run_of_a_newer_milepost_is_refused_with_both_versions(ask: Ask, made: MadeRun, command: str) -> None:
    rewrite(made.folder.record, schema_version=99, reader="9.9.0", invented=1)
    ask.refused(command, "made", "version 99", f"up to {runs.SCHEMA_VERSION}", "milepost>=9.9.0")


@pytest.mark.parametrize("command", ["resume", "verify", "report", "sql"])
def test_a_run_that_a_newer_milepost_went_on_with_is_refused(ask: Ask, made: MadeRun, command: str) -> None:
    attempt = attempts.begin(made.folder, made.parameters, steps=100)
    rewrite(f"{made.folder.uri}/attempts/{attempt.number:06d}.json", schema_version=99, reader="9.9.0", invented=1)
    ask.refused(command, "made", "000002.json", "version 99", "milepost>=9.9.0")


def test_a_run_from_before_versions_were_written_goes_on(made: MadeRun) -> None:
    content = json.loads(Path(made.folder.record).read_text())
    for name in ("schema_version", "attempt", "started_at"):
        content.pop(name)
    Path(made.folder.record).write_text(json.dumps(content))
    assert require_resumable(made.folder, None).attempt == 1


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'"x"', b"{}", b"\xff\xfe", b'{"schema_version": "x"}'])
@pytest.mark.parametrize("command", ["train", "resume", "verify", "report", "sql"])
def test_a_damaged_record_is_named(ask: Ask, made: MadeRun, command: str, content: bytes) -> None:
    Path(made.folder.record).write_bytes(content)
    ask.refused(command, "made", made.folder.record, "restore it from a copy")


@pytest.mark.parametrize("command", ["train", "resume", "verify", "report", "sql"])
def test_a_copy_under_another_name_is_not_taken_for_a_run(ask: Ask, made: MadeRun, command: str) -> None:
    shutil.copytree(made.folder.uri, f"{ask.root}/other")
    ask.refused(command, "other", "other/run.json is of run 'made', not 'other'")


def test_steps_without_their_record_are_not_begun_again(ask: Ask, made: MadeRun) -> None:
    Path(made.folder.record).unlink()
    ask.refused("train", "made", "run.json is missing beside the steps of a run")


def unfinished(made: MadeRun) -> None:
    """The last step is not closed, and the checkpoint before it is gone."""
    Path(made.folder.manifest(STEPS - 1)).unlink()
    shutil.rmtree(made.folder.checkpoint(STEPS - 1))


def test_a_run_that_was_moved_goes_on_and_is_read_where_it_is_now(made: MadeRun, tmp_path: Path) -> None:
    shutil.move(made.folder.uri, tmp_path / "elsewhere" / "made")
    folder = runs.run_folder(str(tmp_path / "elsewhere"), "made")
    assert require_resumable(folder, None).steps == 100
    assert as_rows(query([folder], "select count(distinct step) from rollouts"))[1] == [(STEPS,)]
    assert manifest.load(folder, 0).checkpoint in ("", folder.checkpoint(1))
    assert verify(folder).faults == []


@pytest.mark.parametrize("name", ["prompts/train", "steps/000001/optimize-r0-batch-001", "steps/000002/score-r0-s000"])
@pytest.mark.parametrize("damage", ["is missing", "has digest"])
def test_a_table_that_a_resumption_reads_is_named_when_it_is_not_whole(
    ask: Ask, made: MadeRun, name: str, damage: str
) -> None:
    unfinished(made)
    require_resumable(made.folder, None)
    (table,) = Path(made.folder.uri).glob(f"{name}-*.parquet")
    table.unlink() if damage == "is missing" else table.write_bytes(table.read_bytes()[:-1])
    ask.refused("resume", "made", f"{table} {damage}", "restore it from a copy")
    ask.refused("train", "made", f"{table} {damage}")
    assert attempts.attempts(made.folder) == [] and not Path(made.folder.uri, "lease").exists()


def test_tables_that_a_checkpoint_stands_for_are_not_needed(made: MadeRun) -> None:
    for table in made.step(1).glob("*.parquet"):
        table.unlink()
    require_resumable(made.folder, None)


@pytest.mark.parametrize("name", ["steps/000001/manifest.json", "steps/000002/journal/sample-r0.json"])
def test_a_torn_file_of_a_step_is_named(ask: Ask, made: MadeRun, name: str) -> None:
    unfinished(made)
    Path(made.folder.uri, name).write_text('{"slot": ')
    ask.refused("resume", "made", f"{name} is not JSON")


def test_a_missing_manifest_in_the_middle_is_named(ask: Ask, made: MadeRun) -> None:
    Path(made.folder.manifest(1)).unlink()
    ask.refused("resume", "made", f"{made.folder.manifest(1)} is missing, and later steps are there")


def test_a_finished_step_without_its_batches_is_named(ask: Ask, made: MadeRun) -> None:
    shutil.rmtree(made.folder.checkpoint(STEPS))
    (made.step(2) / "journal" / "optimize-r0.json").unlink()
    ask.refused("resume", "made", "000002", "no optimize commit")


def test_fewer_than_one_step_is_refused(made: MadeRun) -> None:
    with pytest.raises(ValueError, match="steps is 0, it must be at least 1"):
        require_resumable(made.folder, 0)


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_server")
def test_a_finished_run_says_so_and_nothing_is_read_or_recorded(ask: Ask, made: MadeRun) -> None:
    (table,) = Path(made.folder.uri, "prompts").iterdir()
    table.unlink()
    code, told = ask("resume", "made", "--steps", str(STEPS))
    assert (code, told) == (0, f"run made has finished its {STEPS} steps; give more with --steps\n")
    assert attempts.attempts(made.folder) == []


def test_what_the_trainer_computes_with_changes_only_where_a_checkpoint_stands(made: MadeRun) -> None:
    perf = made.parameters.perf.model_copy(update={"packing": False})
    changed = made.parameters.model_copy(update={"perf": perf})
    require_checkpoint(made.folder, attempts.current(made.folder), changed)
    unfinished(made)
    with pytest.raises(ValueError, match="perf.packing cannot change yet: .* since step 1 has .* made --steps 3`"):
        require_checkpoint(made.folder, attempts.current(made.folder), changed)
    optimizer = made.parameters.optimizer.model_copy(update={"lr": 1.0})
    faster = made.parameters.model_copy(update={"optimizer": optimizer})
    require_checkpoint(made.folder, attempts.current(made.folder), faster)


class Told:
    """A trainer that only remembers at which rate it was to learn."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def step(self, batch: TableRef, update: UpdateParams, key: str) -> None:
        self.rates.append(update.optimizer["lr"])


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_server", "ray_cluster")
def test_each_step_names_the_attempt_that_made_it_and_the_report_shows_what_changed(
    tmp_path: Path, model_dir: str, prompts: Prompts
) -> None:
    path = prompts()
    folder = trained("again", tmp_path, parameters(model_dir, path, "optimizer.lr=1e-3"), steps=2)
    changed = sections(parameters(model_dir, path, "optimizer.lr=2e-3"))
    asyncio.run(train(run="again", root=str(tmp_path), steps=3, allow_change=("optimizer.lr",), **changed))
    steps = [manifest.load(folder, step) for step in range(3)]
    assert [step.attempt for step in steps] == [1, 1, 2]
    told = Told()
    for step in range(3):
        replay_step(StepStore(folder.step(step), "again", step), cast(TrainEngine, told))
    assert told.rates[::2] == [1e-3, 1e-3, 2e-3], "each batch is applied again at the rate it was applied at"
    assert steps[1].parameters_digest == runs.load(folder).parameters_digest != steps[2].parameters_digest
    assert verify(folder).faults == []
    page = files.read(write_report(folder)).decode()
    assert "3 of 3 steps" in page and "optimizer.lr: 0.001 &rarr; 0.002" in page and "steps: 2 &rarr; 3" in page
