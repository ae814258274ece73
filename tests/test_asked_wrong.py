"""What people get who ask stored runs for what is not there, for what was damaged, or for a run that still goes on."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from milepost.flows import cli

from .bench.made_run import MadeRun

STEPS = 3
REWARD = ("--reward", "tests.rewards_for_tests:always_one")
Ask = Callable[..., tuple[int, str, str]]


@pytest.fixture
def made(three_steps: MadeRun, tmp_path: Path) -> MadeRun:
    return three_steps.copied(tmp_path / "runs")


@pytest.fixture
def ask(made: MadeRun, capsys: pytest.CaptureFixture[str]) -> Ask:
    """Runs a command on the root of `made`; returns its exit code, what it printed, and what it said."""

    def run(*words: str) -> tuple[int, str, str]:
        code = cli._run([*words, "--root", str(Path(made.folder.uri).parent)], debug=False)
        told = capsys.readouterr()
        return code, told.out, told.err

    return run


@pytest.mark.parametrize(
    "words",
    [
        ("verify", "mede"),
        ("report", "mede"),
        ("resume", "mede"),
        ("replay", "mede"),
        ("replay", "mede", "--set", "algorithm.advantage=rloo"),
        ("regrade", "mede"),
        ("sql", "mede", "select 1"),
        ("show", "mede", "--sample", "000000-0-0000-000"),
        ("export", "mede", "--out", "out.jsonl"),
        ("purge", "mede", "--prompt", "1"),
        ("lineage", "checkpoint:mede@1"),
    ],
    ids=" ".join,
)
def test_every_command_on_a_run_names_the_nearest_one(ask: Ask, words: tuple[str, ...]) -> None:
    code, printed, told = ask(*words)
    assert (code, printed, told.count("\n")) == (2, "", 1)
    assert "no run 'mede'" in told and "did you mean 'made'?" in told


def test_a_root_without_runs_says_where_to_name_another(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli._run(["verify", "made", "--root", str(tmp_path)], debug=False) == 2
    assert "there is no run in" in (told := capsys.readouterr().err) and "--root" in told


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("show", "made", "--sample", "000001-0-0003-009"), "did you mean '000001-0-0003-00"),
        (("show", "made", "--sample", "000077-0-0000-000"), "it has steps 0 to 2"),
        (("lineage", "checkpoint:made@9"), "no checkpoint 9: its last is 3"),
        (("lineage", "sample:000001-0-0003-009"), "did you mean '000001-0-0003-00"),
        (("lineage", f"prompt:{'0' * 20}"), f"did you mean '{0:032x}'?"),
        (("regrade", "made", "--steps", "5:9"), "the run has steps 0 to 2"),
        (("replay", "made", "--steps", "9"), "the run has steps 0 to 2"),
    ],
    ids=str,
)
def test_what_a_run_does_not_have_is_refused_with_what_it_has(ask: Ask, words: tuple[str, ...], hint: str) -> None:
    code, _, told = ask(*words)
    assert (code, told.count("\n")) == (2, 1) and hint in told


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "words",
    [
        ("report", "made"),
        ("regrade", "made", *REWARD),
        ("sql", "made", "select avg(score) from verdicts"),
        ("sql", "made", "select count(*) from prompts"),
        ("show", "made", "--sample", "000001-0-0000-000"),
        ("export", "made", "--out", "out.jsonl"),
        ("lineage", "checkpoint:made@3"),
        ("lineage", f"prompt:{0:032x}"),
    ],
    ids=" ".join,
)
def test_a_table_with_a_flipped_bit_is_refused_in_the_words_of_verify(
    ask: Ask, made: MadeRun, words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for table in made.step(1).glob("*.parquet"):
        damage(table)
    code, _, told = ask(*words)
    assert code == 2 and not list(tmp_path.glob("out*"))
    assert "000001/" in told and "was written: restore it from a copy" in told


def test_a_query_that_does_not_touch_a_damaged_table_is_answered(ask: Ask, made: MadeRun) -> None:
    damage(made.table(1, "filter-r0-s000"))
    assert ask("sql", "made", "select count(*) as n from steps", "--json")[1] == '[{"n": 3}]\n'
    code, _, told = ask("sql", "made", "select count(*) from Drops")
    assert code == 2 and "filter-r0-s000" in told


def test_a_run_that_goes_on_is_read_up_to_what_it_has_committed(ask: Ask, made: MadeRun) -> None:
    Path(made.folder.manifest(2)).unlink()
    (made.step(2) / ".filter.parquet.tmp").write_bytes(b"half")
    counted = "select count(distinct step) as begun, (select count(*) from steps) as steps from rollouts"
    assert json.loads(ask("sql", "made", counted, "--json")[1]) == [{"begun": 3, "steps": 2}]
    assert json.loads(ask("regrade", "made", *REWARD, "--json")[1])["samples"] == 16
    assert len(json.loads(ask("lineage", "checkpoint:made@2", "--json")[1])["steps"]) == 2
    assert "its last is 2" in ask("lineage", "checkpoint:made@3")[2]
    assert "2 of 100 steps" in Path(ask("report", "made")[1].strip()).read_text()


def test_a_run_without_a_finished_step_says_so(made: MadeRun, ask: Ask) -> None:
    for step in range(STEPS):
        Path(made.folder.manifest(step)).unlink()
    for words in (("regrade", "made", *REWARD), ("replay", "made")):
        code, _, told = ask(*words)
        assert code == 2 and "the run has finished no step yet" in told
