"""Prompts taken out of a stored run: gone from every file, and the run still explains itself and goes on."""

import asyncio
import html
import json
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from milepost.flows import lineage
from milepost.flows.fine_tune import Example, example_row
from milepost.flows.purge import holders, others_with, purge_run
from milepost.flows.regrading import regrade_run
from milepost.flows.replay import replay
from milepost.flows.sample_view import find_sample
from milepost.flows.sql import as_rows, query
from milepost.storage import files, manifest, purge, purges, runs
from milepost.storage.lease import LeaseHeld, hold
from milepost.storage.purge import Finding
from milepost.storage.runs import RunFolder
from milepost.storage.schema import ROLLOUTS, from_rows
from milepost.storage.tables import DamagedTable, read_bytes, write_table
from milepost.storage.taught import SFT_RECORD, Taught
from milepost.storage.verify import verify
from milepost.tasks.recover import require_tables

from .bench.made_run import make_run
from .test_cli import milepost, refused
from .test_train_fake import parameters, trained

slow = pytest.mark.slow

TEXTS = [f"{number}{number + 1}77{number}35+{number}=" for number in range(12)]
GONE = 2  # the row of the prompt that is purged


def write_prompts(path: Path, rows: list[int], *, bad: str = "") -> str:
    lines = [json.dumps({"prompt": TEXTS[row], "label": str(row), "metadata": {"note": TEXTS[row]}}) for row in rows]
    path.write_text("\n".join([*lines, *([bad] if bad else [])]) + "\n")
    return str(path)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory, model_dir: str, prefect_server: str, ray_cluster: None) -> Path:
    """Three steps of fake engines: every prompt is served twice, one evaluated, and a malformed line says it too."""
    base = tmp_path_factory.mktemp("purged")
    told = [
        "data.shuffle=false",
        "data.on_bad_line=quarantine",
        "checkpoint.every_steps=1",
        f"eval.path={write_prompts(base / 'held-out.jsonl', [GONE])}",
        "eval.every_steps=3",
    ]
    path = write_prompts(base / "prompts.jsonl", list(range(12)), bad=f'{{"prompt": "{TEXTS[GONE]}", }}')
    trained("first", base / "runs", parameters(model_dir, path, *told), steps=3)
    return base


@pytest.fixture
def root(stored: Path, tmp_path: Path) -> Path:
    shutil.copytree(stored / "runs", tmp_path / "runs")
    return tmp_path / "runs"


@pytest.fixture
def run(root: Path) -> RunFolder:
    return runs.run_folder(str(root), "first")


def gone_id(run: RunFolder) -> str:
    _, rows = as_rows(query([run], f"select distinct prompt_id from prompts where row = {GONE}"))
    return str(rows[0][0])


def telling(folder: Path, text: str) -> list[str]:
    """The files below a folder that tell a text: in their bytes, or in a column of a table."""
    forms = {text.encode(), json.dumps(text)[1:-1].encode(), html.escape(text).encode()}
    found = []
    for path in (path for path in folder.rglob("*") if path.is_file()):
        told = path.read_bytes()
        if path.suffix == ".parquet":
            told += json.dumps(pq.read_table(path).to_pylist(), default=str).encode()
        if any(form in told for form in forms):
            found.append(str(path.relative_to(folder)))
    return found


@slow
def test_the_text_is_gone_from_every_file_of_the_run(run: RunFolder, root: Path) -> None:
    before, folder = telling(root, TEXTS[GONE]), Path(run.uri)
    (folder / "steps" / "000000" / ".generate.tmp").write_text(TEXTS[GONE])
    (folder / "logs" / "rollout-0.log.1").write_text(f"asked\n{TEXTS[GONE]}\nanswered\n")
    assert {path.split("/")[1] for path in before} >= {"steps", "evals", "prompts", "quarantine.jsonl"}
    beside = {row: telling(root, TEXTS[row]) for row in range(12) if row != GONE}
    done = purge_run(str(root), run, [gone_id(run)], reason="asked for")
    assert telling(root, TEXTS[GONE]) == [] and done.left == []
    assert (folder / "logs" / "rollout-0.log.1").read_text() == "asked\n[purged]\nanswered\n"
    assert {row: telling(root, TEXTS[row]) for row in beside}.keys() == beside.keys()
    assert all(set(telling(root, TEXTS[row])) >= {p for p in beside[row] if "report" not in p} for row in beside)
    asked = f"select distinct response, list_sum(response_token_ids) from rollouts where prompt_id = '{gone_id(run)}'"
    _, rows = as_rows(query([run], asked))
    assert {response for response, _ in rows} == {"[purged]"} and {total for _, total in rows} <= {0, None}


@slow
def test_a_dry_run_says_all_that_the_purge_then_does(run: RunFolder, root: Path) -> None:
    folder = Path(run.uri)
    (folder / ".half.tmp").write_text(TEXTS[GONE])
    (folder / "notes.txt").write_text(f"mine: {TEXTS[GONE]}")
    (folder / "logs" / "rollout-0.log.1").write_text(f"asked\n{TEXTS[GONE]}\n")
    would = purge_run(str(root), run, [gone_id(run)], dry_run=True)
    assert {"logs/rollout-0.log.1", "quarantine.jsonl", "report.html"} <= {*would.cleaned} and would.left == [
        "notes.txt"
    ]
    assert purge_run(str(root), run, [gone_id(run)]) == would


@slow
def test_the_run_explains_what_was_purged_and_when(run: RunFolder, root: Path) -> None:
    chain = [manifest.manifest_digest(run, step) for step in range(3)]
    counts = [manifest.load(run, step).accounting for step in range(3)]
    purge_run(str(root), run, [gone_id(run)], reason="asked for")
    found, (record,) = verify(run), purges.purges(run.uri)
    assert found.faults == []
    said = f"{len(record.tables)} tables purged on {record.date} (asked for) of what prompts said: {gone_id(run)}"
    assert said in found.notes
    assert [manifest.manifest_digest(run, step) for step in range(3)] == chain
    assert [manifest.load(run, step).accounting for step in range(3)] == counts
    (touch,) = lineage.answer(f"prompt:{gone_id(run)}", str(root)).runs
    assert (touch.served, touch.purged) == ([0, 1], record.date) and len(touch.checkpoints) >= 1
    shown = find_sample(str(root), "first", touch.samples[0])
    assert (shown["purged"], shown["response"], set(shown["tokens"])) == (record.date, "[purged]", {""})
    regraded = asyncio.run(regrade_run("first", str(root), reward=None, steps="", threshold=0.5))
    assert regraded.samples == 3 * 8 * 2 - len(touch.samples)
    with pytest.raises(ValueError, match="step 0 of run 'first' cannot be run again.*were purged on 20"):
        asyncio.run(replay(run="first", root=str(root), steps="0:1"))


@slow
def test_a_tombstone_that_is_not_what_the_record_says_is_a_fault(run: RunFolder, root: Path) -> None:
    table = Path(run.uri, next(item.file for item in purge.find(run, [gone_id(run)]).tables if "score" in item.file))
    whole = table.read_bytes()
    purge_run(str(root), run, [gone_id(run)])
    table.write_bytes(whole)
    assert any("its last purge left" in fault.problem for fault in verify(run).faults)
    table.write_bytes(whole[:-1] + b"x")
    assert any("was written" in fault.problem for fault in verify(run).faults)


@slow
def test_a_purge_that_was_killed_leaves_a_sound_run_and_is_finished_by_the_next(run: RunFolder, root: Path) -> None:
    name = gone_id(run)
    found = purge.find(run, [name])
    purges.publish(run.uri, found.prompts, found.tables, reason="")
    purge.replace_tables(run, Finding(found.prompts, found.tables[::2]))
    halfway = verify(run)
    assert halfway.faults == [] and f"`milepost purge first --prompt {name}` finishes it" in " ".join(halfway.notes)
    assert telling(root, TEXTS[GONE])
    purge_run(str(root), run, [name])
    assert telling(root, TEXTS[GONE]) == [] and verify(run).faults == []
    assert purges.unfinished(run.uri) == [] and len(purges.purges(run.uri)) == 2
    assert purge_run(str(root), run, [name]).tables == [] and len(purges.purges(run.uri)) == 2


@slow
def test_a_run_goes_on_without_its_purged_prompts(run: RunFolder, root: Path, stored: Path, model_dir: str) -> None:
    name = gone_id(run)
    purge_run(str(root), run, [name])
    stdout = milepost("resume", "first", "--root", str(root), "--steps", "4", "--json").stdout
    assert json.loads(stdout)["steps"] == 4
    asked = "select status, drop_reason, len(response_token_ids) from rollouts where step = 3 and prompt_id = "
    _, rows = as_rows(query([run], f"{asked}'{name}'"))
    assert rows == [("aborted", "aborted", 0)] * 2
    assert manifest.load(run, 3).accounting == {"aborted": 1, "served": 8, "trained": 7}
    assert verify(run).faults == [] and telling(root, TEXTS[GONE]) == []


@slow
def test_the_command_says_what_it_did_and_what_is_left_to_do(run: RunFolder, root: Path, stored: Path) -> None:
    shutil.copytree(run.uri, root / "second")
    record = json.loads((root / "second" / "run.json").read_text())
    (root / "second" / "run.json").write_text(json.dumps(record | {"run_id": "second"}))
    name, before = gone_id(run), telling(root, TEXTS[GONE])
    asked = ["purge", "first", "--prompt", name, "--root", str(root)]
    would = milepost(*asked, "--dry-run")
    assert would.stdout.startswith("first: would replace") and telling(root, TEXTS[GONE]) == before
    did = milepost(*asked).stdout
    assert did.replace("replaced", "would replace").splitlines()[0] == would.stdout.splitlines()[0]
    assert f"{stored}/prompts.jsonl is yours" in did and "one of these prompts is in second too" in did
    every = json.loads(milepost(*asked, "--runs", "*", "--force", "--json").stdout)
    assert [one["run"] for one in every["runs"]] == ["first", "second"] and every["others"] == []
    assert telling(root, TEXTS[GONE]) == []
    unknown = milepost("purge", "first", "--prompt", f"{name[:-1]}x", "--root", str(root))
    refused(unknown, f"no prompt '{name[:-1]}x' in first", "did you mean", name)


def made(base: str) -> tuple[RunFolder, str]:
    return make_run(base, 3).folder, f"{1:032x}"


def test_a_run_that_is_worked_on_is_left_alone(tmp_path: Path) -> None:
    folder, name = made(str(tmp_path))
    with hold(folder), pytest.raises(LeaseHeld, match="works on"):
        purge_run(str(tmp_path), folder, [name])
    assert purges.purges(folder.uri) == []


def test_what_a_run_needs_to_go_on_is_taken_only_by_force(tmp_path: Path) -> None:
    folder, name = made(str(tmp_path))
    shutil.rmtree(tmp_path / "made" / "checkpoints")
    with pytest.raises(ValueError, match=r"run 'made' needs what step \d has of these prompts.*give --force"):
        purge_run(str(tmp_path), folder, [name])
    assert purges.purges(folder.uri) == []
    purge_run(str(tmp_path), folder, [name], force=True)
    with pytest.raises(ValueError, match="run 'made' cannot go on: prompts were purged on 20"):
        require_tables(folder, [])


def test_a_damaged_table_is_not_taken_for_a_purged_one(tmp_path: Path) -> None:
    folder, name = made(str(tmp_path))
    (table,) = (tmp_path / "made" / "prompts").glob("*.parquet")
    other = next(iter((tmp_path / "made" / "steps" / "000000").glob("sample*.parquet")))
    table.write_bytes(other.read_bytes())
    with pytest.raises(DamagedTable, match="was written: restore it from a copy"):
        purge_run(str(tmp_path), folder, [name])
    assert purges.purges(folder.uri) == []


def test_a_run_on_an_object_store_is_purged_too() -> None:
    folder, name = made("memory://purged")
    purge_run("memory://purged", folder, [name], reason="why")
    found = verify(folder)
    assert found.faults == [] and "tables purged on" in found.notes[-1]
    (uri,) = [uri for uri in purge.table_uris(folder) if "/prompts/" in uri]
    rows = read_bytes(files.read(uri)).to_pylist()
    assert [row["prompt"] == row["label"] == '"[purged]"' for row in rows] == [at == 1 for at in range(len(rows))]
    assert others_with("memory://purged", [], [name]) == []
    files.remove_folder("memory://purged")


def taught(base: Path, folder: RunFolder, prompt: str, *, ended: bool) -> RunFolder:
    """A fine-tuning that has learnt a prompt in its only step."""
    found = runs.run_folder(str(base), "taught")
    record = json.loads(Path(folder.record).read_text())
    entry = Taught(file="talks.jsonl", digest="", rows=1, too_long=0, batch_size=1, seed=0).entry()
    files.publish_json(found.record, record | {"run_id": "taught", "data": {"prompts": None, "eval": None, **entry}})
    row = example_row(Example(prompt, [1], "learnt", [2]), run="taught", step=0, position=0)
    write_table(files.join(found.step(0), "batch"), from_rows([row], ROLLOUTS), ROLLOUTS)
    if ended:
        files.publish_json(files.join(found.uri, SFT_RECORD), {})
    return found


def test_a_prompt_is_found_by_what_it_says_also_where_it_was_learnt(tmp_path: Path) -> None:
    folder, name = made(str(tmp_path))
    learnt = taught(tmp_path, folder, purge.said(folder)[name][0], ended=True)
    assert others_with(str(tmp_path), [folder], [name]) == ["taught"]
    chosen = holders([folder, learnt], [name])
    assert chosen[folder] == {name} and chosen[learnt] == purge.said(learnt).keys() != {name}
    done = purge_run(str(tmp_path), learnt, chosen[learnt])
    assert (done.rows, done.sources) == (1, ["talks.jsonl"]) and set(purge.said(learnt).values()) == {()}


def test_a_fine_tuning_that_would_write_a_prompt_again_is_purged_only_by_force(tmp_path: Path) -> None:
    folder, name = made(str(tmp_path))
    learnt = taught(tmp_path, folder, purge.said(folder)[name][0], ended=False)
    with pytest.raises(ValueError, match="'taught' has not ended and would write these prompts once more"):
        purge_run(str(tmp_path), learnt, purge.said(learnt))
    assert purge_run(str(tmp_path), learnt, purge.said(learnt), force=True).rows == 1


def test_prompts_are_looked_for_in_all_runs(tmp_path: Path) -> None:
    folder, name = made(str(tmp_path))
    assert holders([folder], [name]) == {folder: {name}}
    with pytest.raises(LookupError, match="no prompt 'nobody' in made"):
        holders([folder], [name, "nobody"])
