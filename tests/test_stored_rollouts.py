"""Runs that make only some of the stages: rollouts without training, and training on what another run has stored."""

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from milepost.engines.tiny_model import write_tiny_model
from milepost.engines.tokenizer import load_tokenizer, write_character_tokenizer
from milepost.flows.import_run import Import, import_run
from milepost.flows.lineage import Touched, answer
from milepost.flows.plan import make_plan
from milepost.flows.plan_numbers import describe
from milepost.flows.replay import replay
from milepost.flows.report import write_report
from milepost.flows.sql import as_rows, query
from milepost.flows.start import require_allowed
from milepost.flows.train import resume
from milepost.storage import attempts, files, manifest, runs
from milepost.storage.ancestry import Ancestry
from milepost.storage.journal import Slot, StepStore
from milepost.storage.parameters import DataSection, Parameters, RewardSection, RolloutSection
from milepost.storage.parent import taken_from
from milepost.storage.runs import RunFolder
from milepost.storage.verify import verify

from .test_train_fake import parameters, trained

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, model_dir: str, prefect_server: str, ray_cluster: None) -> Path:
    """A root with the run `base` of three steps on forty prompts."""
    place = tmp_path_factory.mktemp("stored")
    rows = [{"prompt": f"{number}+1=", "label": str(number + 1)} for number in range(40)]
    (place / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    trained("base", place, chosen(place, model_dir), steps=3)
    return place


def chosen(place: Path, model_dir: str, *overrides: str) -> Parameters:
    return parameters(model_dir, str(place / "prompts.jsonl"), "rollout.shards=2", *overrides)


def begun_and_resumed(run: str, place: Path, parameters: Parameters) -> RunFolder:
    """Two steps, the second in a resumption."""
    trained(run, place, parameters, steps=1)
    asyncio.run(resume(run=run, root=str(place), steps=2))
    return runs.run_folder(str(place), run)


@pytest.fixture(scope="module")
def sampled(base: Path, model_dir: str) -> RunFolder:
    return begun_and_resumed("sampled", base, chosen(base, model_dir, "engines.train=none"))


@pytest.fixture(scope="module")
def learned(base: Path, model_dir: str) -> RunFolder:
    """Trained on what `base` has stored, by another filter and another estimator."""
    other = ["data.rollouts=base", "filter.group=nonzero_std", "algorithm.advantage=rloo"]
    return begun_and_resumed("learned", base, chosen(base, model_dir, *other))


def column(folder: RunFolder, statement: str) -> list[Any]:
    return [row[0] for row in as_rows(query([folder], statement))[1]]


def test_a_run_that_trains_nothing_keeps_the_weights_that_training_begins_with(base: Path, sampled: RunFolder) -> None:
    first = manifest.load(runs.run_folder(str(base), "base"), 0)
    closed = [manifest.load(sampled, step) for step in (0, 1)]
    assert {version for step in closed for version in (step.version_in, step.version_out)} == {first.version_in}
    assert [step.accounting for step in closed] == [{"kept": 8, "served": 8}] * 2
    assert not [entry for step in closed for entry in step.commits if entry["slot"].startswith("optimize")]
    assert not any(name.startswith("train/") for step in closed for name in step.metrics)
    assert not files.names(files.join(sampled.uri, "checkpoints"))


def test_what_trains_nothing_samples_what_training_would_have(base: Path, sampled: RunFolder) -> None:
    asked = "select response from rollouts where step = 0 order by sample_id"
    assert column(sampled, asked) == column(runs.run_folder(str(base), "base"), asked)


def test_a_run_that_trains_nothing_is_verified_replayed_and_reported(base: Path, sampled: RunFolder) -> None:
    found = verify(sampled)
    assert (found.faults, found.steps, found.samples) == ([], 2, 32)
    judged = asyncio.run(replay(run="sampled", root=str(base)))
    assert (judged["verdict"], {item["stage"] for item in judged["stages"]}) == ("identical", {"score", "filter"})
    assert "2 of 2 steps" in files.read(write_report(sampled)).decode()


def test_stored_samples_are_trained_on_as_they_are(base: Path, learned: RunFolder) -> None:
    asked = "select sample_id || response || reward || weights_digest from rollouts where step < 2 order by sample_id"
    assert column(learned, asked) == column(runs.run_folder(str(base), "base"), asked)
    (kept,) = column(learned, "select count(*) from rollouts where kept")
    assert 0 < kept < 32 and column(learned, "select count(*) from batches") == [kept]
    assert manifest.load(learned, 1).version_out.startswith("2-")


def test_every_taken_table_says_where_it_comes_from(base: Path, learned: RunFolder) -> None:
    own, source = StepStore(learned.step(1), "learned", 1), runs.run_folder(str(base), "base")
    for slot in (Slot("sample"), Slot("generate", 0, 1), Slot("score", 0, 0)):
        commit, stored = own.stored(slot), StepStore(source.step(1), "base", 1).stored(slot)
        assert commit and stored and (taken := taken_from(commit.record))
        assert (taken.run, taken.step, taken.manifest) == ("base", 1, manifest.manifest_digest(source, 1))
        assert taken.tables == {name: ref.digest for name, ref in stored.tables.items()}
    filtered = own.stored(Slot("filter", 0, 0))
    assert filtered and taken_from(filtered.record) is None


def test_a_run_on_stored_samples_needs_the_other_run_no_more(learned: RunFolder, tmp_path: Path) -> None:
    shutil.copytree(learned.uri, tmp_path / "learned")
    assert verify(runs.run_folder(str(tmp_path), "learned")).faults == []
    judged = asyncio.run(replay(run="learned", root=str(tmp_path)))
    assert judged["verdict"] == "identical"
    assert {item["stage"] for item in judged["stages"]} == {"filter", "optimize", "weights"}


def test_groups_of_unequal_sizes_that_were_imported_are_trained_on_and_verified(base: Path, model_dir: str) -> None:
    rows = [(question, answer) for question in range(5) for answer in range(1 + question % 3)]
    (base / "foreign.jsonl").write_text("".join(json.dumps(foreign_row(*row)) + "\n" for row in rows))
    wanted = Import(str(base / "foreign.jsonl"), "foreign", str(base), model_dir, groups_per_step=2)
    asyncio.run(import_run(wanted))
    own = ["data.rollouts=foreign", "model.context_length=4096", "algorithm.num_steps_per_rollout=1"]
    defaults = {"data": DataSection(rollouts="foreign"), "rollout": RolloutSection(), "reward": RewardSection()}
    folder = trained("taught", base, chosen(base, model_dir, *own).model_copy(update=defaults), steps=3)
    found = verify(folder)
    assert (found.faults, found.samples) == ([], len(rows))


def foreign_row(question: int, answer: int) -> dict[str, Any]:
    said = [{"role": "user", "content": f"{question}+1="}, {"role": "assistant", "content": str(answer)}]
    return {"messages": said, "prompt": f"{question}+1=", "label": str(question + 1), "reward": answer % 2}


def test_lineage_goes_on_in_the_run_whose_samples_were_taken(base: Path, learned: RunFolder) -> None:
    found = answer("checkpoint:learned@2", str(base))
    assert isinstance(found, Ancestry) and isinstance(found.source, Ancestry)
    assert [(step.taken["run"], step.taken["step"]) for step in found.steps] == [("base", 0), ("base", 1)]
    assert (found.source.run, len(found.source.steps)) == ("base", 2)
    (prompt,) = column(learned, "select prompt_id from batches where step = 1 limit 1")
    touched = answer(f"prompt:{prompt}", str(base))
    assert isinstance(touched, Touched)
    assert {item.run: item.checkpoints for item in touched.runs}["learned"] == [learned.checkpoint(2)]


def test_a_plan_says_what_is_taken_and_that_nothing_is_trained(base: Path, model_dir: str) -> None:
    numbers = describe(make_plan("new", str(base), 2, chosen(base, model_dir, "data.rollouts=base")))
    assert numbers["taken from base"] == "sample, generate, score of steps 0 to 1" and numbers["rollout engines"] == 0
    idle = describe(make_plan("new", str(base), 2, chosen(base, model_dir, "engines.train=none")))
    assert str(idle["trained"]).startswith("nothing") and "optimizer steps" not in idle


@pytest.mark.parametrize(
    ("overrides", "steps", "problem"),
    [
        (["data.rollouts=bose"], 1, "no run 'bose'.*did you mean 'base'"),
        (["data.rollouts=base"], 4, "'base' has 3 finished steps and 4 are asked for"),
        (["data.rollouts=base", "data.n_samples_per_prompt=4"], 1, "n_samples_per_prompt is 4, .* made with 2"),
        (["data.rollouts=base", "rollout.temperature=0.5"], 1, "rollout.temperature is 0.5, .* made with 1.0"),
        (["data.rollouts=base", "engines.train=none"], 1, "leave one out"),
        (["data.rollouts=new"], 1, "cannot go on from itself"),
        (["data.rollouts=base", "model.context_length=16"], 1, "less than the 32 of run 'base'"),
        (["engines.rollout=none"], 1, "nothing stored is taken"),
        (["data.rollouts=base", "eval.every_steps=1"], 1, "an evaluation needs rollout engines"),
    ],
)
def test_what_stored_samples_cannot_give_is_refused_by_the_plan(
    base: Path, model_dir: str, overrides: list[str], steps: int, problem: str
) -> None:
    with pytest.raises((ValueError, LookupError), match=problem):
        make_plan("new", str(base), steps, chosen(base, model_dir, *overrides))
    assert not (base / "new").exists()


def test_a_model_that_reads_other_tokens_is_refused(base: Path, tmp_path: Path) -> None:
    other = str(tmp_path / "other")
    write_character_tokenizer(other, "9876543210+-*=")
    size = load_tokenizer(other).vocab_size
    write_tiny_model(other, vocab_size=size, hidden=32, layers=2, heads=4, kv_heads=2, seed=0)
    with pytest.raises(ValueError, match="has another tokenizer than run 'base'"):
        make_plan("new", str(base), 1, chosen(base, other, "data.rollouts=base"))


def test_which_stages_a_run_has_is_settled_when_it_begins(learned: RunFolder) -> None:
    before = attempts.current(learned)
    idle = before.parameters.engines.model_copy(update={"train": "none"})
    changed = before.parameters.model_copy(update={"engines": idle})
    with pytest.raises(ValueError, match="engines.train decides which stages run 'learned' has"):
        require_allowed(before, changed, ["engines.train"])


@pytest.fixture
def damaged(base: Path) -> Iterator[Path]:
    path = next((base / "base" / "steps" / "000001").glob("generate-r0-s001-*.parquet"))
    kept = path.read_bytes()
    path.write_bytes(kept[:-1] + b"x")
    yield path
    path.write_bytes(kept)


def test_a_source_whose_table_is_not_as_it_was_written_is_refused(base: Path, model_dir: str, damaged: Path) -> None:
    with pytest.raises(ValueError, match=f"{damaged.name} has digest [0-9a-f]+, [0-9a-f]+ was written"):
        make_plan("new", str(base), 2, chosen(base, model_dir, "data.rollouts=base"))
