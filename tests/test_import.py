"""Rollouts that were made elsewhere become a stored run: what they say is kept, and what they do not say is null."""

import asyncio
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from milepost.flows.export import export
from milepost.flows.import_run import Import, Imported, import_run
from milepost.flows.lineage import answer
from milepost.flows.regrading import regrade_run
from milepost.flows.report import write_report
from milepost.flows.sample_view import find_sample, show_sample
from milepost.flows.sql import as_rows, query
from milepost.flows.start import require_resumable
from milepost.storage import runs
from milepost.storage.ancestry import Ancestry
from milepost.storage.begun import Origin
from milepost.storage.journal import Slot, StepStore
from milepost.storage.parameters import RewardSection
from milepost.storage.parent import TAKEN, Taken
from milepost.storage.runs import RunFolder
from milepost.storage.tables import read_table
from milepost.storage.text import to_json
from milepost.storage.verify import verify
from milepost.storage.verify_stored import StoredStep
from milepost.storage.verify_taken import check_taken, samples_vary

FIXTURES = Path(__file__).parent / "fixtures"
Row = dict[str, Any]
Importer = Callable[..., RunFolder]


def row(question: str = "1+1=", answer: str = "2", **more: Any) -> Row:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": messages, "prompt": question, "label": "2", **more}


@pytest.fixture
def imported(tmp_path: Path, model_dir: str) -> Importer:
    """Imports rows, and returns the folder of the run."""

    def make(rows: list[Row], run: str = "foreign", **options: Any) -> RunFolder:
        bring(tmp_path, rows, model=model_dir, run=run, **options)
        return runs.run_folder(str(tmp_path), run)

    return make


def bring(root: Path, rows: list[Row], **options: Any) -> Imported:
    file = root / "rollouts.jsonl"
    file.write_text("".join(to_json(item) + "\n" for item in rows))
    return asyncio.run(import_run(Import(file=str(file), root=str(root), **options)))


def asked(folder: RunFolder, columns: str) -> list[tuple[Any, ...]]:
    return as_rows(query([folder], f"select {columns} from rollouts order by sample_id"))[1]


def test_rows_are_grouped_by_prompt_and_what_they_lack_is_null(imported: Importer) -> None:
    folder = imported([row(reward=1), row("3+4=", "7", reward=True), row(answer="3", reward=0.5), row("3+4=", "8")])
    assert asked(folder, "sample_id, response, reward") == [
        ("000000-0-0000-000", "2", 1.0),
        ("000000-0-0000-001", "3", 0.5),
        ("000000-0-0001-000", "7", 1.0),
        ("000000-0-0001-001", "8", None),
    ]
    nothing = asked(folder, "rollout_logprobs, finish_reason, seed, weight_version_min, weights_digest")
    assert nothing == [(None,) * 5] * 4
    assert runs.load(folder).data["origin"]["lacking"]["reward"] == 1
    assert verify(folder).faults == []


def test_a_response_is_tokenized_and_ends_when_the_model_ended_it(imported: Importer) -> None:
    folder = imported(
        [row(answer="12"), row(answer="12", finish_reason="stop"), row(answer="12", finish_reason="length")]
    )
    tokens = asked(folder, "response_token_ids, loss_mask, status")
    assert tokens == [([4, 5], [1, 1], "completed"), ([4, 5, 1], [1, 1, 1], "completed"), ([4, 5], [1, 1], "truncated")]


def test_what_is_exported_is_imported_as_it_was(tmp_path: Path, model_dir: str) -> None:
    """Every column that a stage before the optimizer fills, ids and steps among them."""
    shutil.copytree(FIXTURES / "records-2-tables-1" / "old", tmp_path / "old")
    first, again = tmp_path / "first.jsonl", tmp_path / "again.jsonl"
    export(runs.run_folder(str(tmp_path), "old"), str(first))
    wanted = Import(file=str(first), root=str(tmp_path), run="copy", model=model_dir)
    assert asyncio.run(import_run(wanted)).steps == 2
    copy = runs.run_folder(str(tmp_path), "copy")
    export(copy, str(again))
    before, after = ([json.loads(line) for line in path.read_bytes().splitlines()] for path in (first, again))
    assert before == [item | {"run_id": "old"} for item in after]
    assert verify(copy).faults == []


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(
    rows=st.lists(
        st.tuples(
            st.text(st.characters(exclude_categories=[]), min_size=1, max_size=5),
            st.text(st.characters(exclude_categories=[]), max_size=5),
            st.none() | st.floats(-1e100, 1e100),
            st.recursive(st.none() | st.booleans() | st.text(max_size=3), st.lists, max_leaves=3),
        ),
        min_size=1,
        max_size=5,
    ),
    size=st.integers(1, 3),
)
def test_any_rows_are_sound_runs_and_come_out_as_they_went_in(
    tmp_path_factory: pytest.TempPathFactory, model_dir: str, rows: list[tuple[Any, ...]], size: int
) -> None:
    root = tmp_path_factory.mktemp("any")
    given_rows = [row(asked_, said, reward=reward) | {"label": label} for asked_, said, reward, label in rows]
    bring(root, given_rows, model=model_dir, run="one", groups_per_step=size)
    folder = runs.run_folder(str(root), "one")
    export(folder, str(root / "out.jsonl"))
    found = [json.loads(line) for line in (root / "out.jsonl").read_bytes().splitlines()]
    bring(root, found, model=model_dir, run="two", groups_per_step=size)  # with the tokens that it was given
    names = ("messages", "label", "reward")
    key = [to_json([item[name] for name in names]) for item in found]
    assert sorted(key) == sorted(to_json([item[name] for name in names]) for item in given_rows)
    assert verify(folder).faults == []


BAD = [
    ({"messages": []}, "messages is \\[\\]: the last message must be the assistant's answer"),
    ({"messages": [{"role": "user", "content": "1"}] * 2}, "must be the assistant's answer"),
    ({"messages": [{"content": "1"}]}, "messages.0 is .*: a message has 'role' and 'content'"),
    ({"reward": "much"}, "reward is 'much'"),
    ({"reward": 1e200}, "reward is 1e\\+200: Input should be less than"),
    ({"response_token_ids": [4, "5"]}, "response_token_ids.1 is '5'"),
    ({"response_token_ids": [4, 5]}, "response_token_ids are not '2' in this tokenizer"),
    ({"response_token_ids": [99], "loss_mask": [1]}, "response_token_ids are not '2'"),
    ({"prompt_token_ids": [9, 9]}, "prompt_token_ids are not '1\\+1='"),
    (
        {"response_token_ids": [5], "rollout_logprobs": [-0.1, -0.2]},
        "2 values of rollout_logprobs for 1 response tokens",
    ),
    ({"loss_mask": [1]}, "has loss_mask and no response_token_ids"),
    ({"response_token_ids": [5], "loss_mask": [2]}, "loss_mask.0 is 2"),
    ({"finish_reason": "eos"}, "finish_reason is 'eos'"),
    ({"group_id": "g"}, "has a group_id: give all rows one, or none"),
    ({"kept": True, "drop_reason": "x"}, "is kept and has drop_reason 'x'"),
    ({"response_token_ids": [5] * 40}, r"has 4 \+ 40 tokens, model.context_length is 32"),
]


@pytest.mark.parametrize(("wrong", "reason"), BAD)
def test_a_bad_row_is_named_and_nothing_is_written(imported: Importer, tmp_path: Path, wrong: Row, reason: str) -> None:
    with pytest.raises(ValueError, match=f"rollouts.jsonl line 2: .*{reason}"):
        imported([row(), row() | wrong], context_length=32)
    assert [path.name for path in tmp_path.iterdir()] == ["rollouts.jsonl"]


def test_lines_that_are_no_json_objects_are_named(tmp_path: Path, model_dir: str) -> None:
    file = tmp_path / "x.jsonl"
    for text, reason in (
        ("\n{", "line 2: not JSON"),
        ("[]", "line 1: a list"),
        ('{"a": NaN}', "NaN"),
        ("\n\n", "no rows"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=reason):
            asyncio.run(import_run(Import(file=str(file), run="x", root=str(tmp_path), model=model_dir)))


def test_ids_that_are_given_are_kept_and_may_not_repeat_or_disagree(imported: Importer) -> None:
    named = [row(group_id="g", sample_id="a", prompt_id="p"), row(group_id="h", sample_id="b", prompt_id="p")]
    folder = imported(named)
    assert asked(folder, "group_id, sample_id, prompt_id") == [("g", "a", "p"), ("h", "b", "p")]
    assert find_sample(str(Path(folder.uri).parent), "foreign", "b")["group_id"] == "h"
    with pytest.raises(ValueError, match="line 2: sample_id 'a' is that of line 1"):
        imported([named[0], named[1] | {"sample_id": "a"}], run="other")
    with pytest.raises(ValueError, match="line 2: has group_id 'g' and another prompt or label than line 1"):
        imported([named[0], row("2+2=", group_id="g", sample_id="b")], run="other")


def test_groups_are_cut_into_steps_and_the_last_may_be_smaller(imported: Importer) -> None:
    folder = imported([row(f"{at}+1=", reward=1) for at in range(5)], groups_per_step=2)
    assert as_rows(query([folder], "select step, count(*) from rollouts group by 1 order by 1"))[1] == [
        (0, 2), (1, 2), (2, 1),
    ]  # fmt: skip
    assert verify(folder).faults == []


def test_samples_are_scored_by_a_reward_that_is_named(imported: Importer) -> None:
    folder = imported([row(reward=0.25), row(answer="3", reward=0.25)], reward=RewardSection(name="exact"))
    assert asked(folder, "reward, kept") == [(1.0, True), (0.0, True)]
    assert asked(folder, "verdict ->> '$.grader' like 'exact@%'") == [(True,), (True,)]


def test_the_score_may_have_another_name(imported: Importer) -> None:
    folder = imported([row(score=0.5, reward="unused")], reward_key="score")
    assert asked(folder, "reward, verdict ->> '$.grader' like 'rollouts.jsonl@%'") == [(0.5, True)]


def test_tokens_that_are_not_the_text_are_counted_when_told(imported: Importer) -> None:
    folder = imported([row(response_token_ids=[4, 5])], allow_mismatch=True)
    assert asked(folder, "response, response_token_ids") == [("2", [4, 5])]
    assert runs.load(folder).data["origin"]["mismatches"] == 1


def test_a_run_that_was_imported_is_shown_reported_and_says_where_it_is_from(
    imported: Importer, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = imported([row(reward=1), row(answer="3", reward=0)])
    show_sample(find_sample(str(Path(folder.uri).parent), "foreign", "000000-0-0000-001"))
    assert "weights not known; completed, seed not known" in capsys.readouterr().out
    found = answer("checkpoint:foreign@1", str(Path(folder.uri).parent))
    assert isinstance(found, Ancestry) and isinstance(found.parent, Origin)
    assert (found.parent.kind, found.parent.record["rows"]) == ("import", 2)
    assert Path(write_report(folder)).exists()


def test_a_run_that_was_imported_cannot_go_on_and_its_name_is_taken(imported: Importer) -> None:
    folder = imported([row()])
    with pytest.raises(ValueError, match="was imported from .*rollouts.jsonl and has nothing to go on with"):
        require_resumable(folder, 5)
    with pytest.raises(FileExistsError, match="already exists"):
        imported([row()])


def test_a_changed_group_or_row_of_it_is_a_fault(imported: Importer) -> None:
    folder = imported([row(reward=1), row(answer="3", reward=0)])
    table = next(Path(folder.step(0)).glob("filter-*.parquet"))
    table.write_bytes(table.read_bytes()[:-1])
    assert [fault.file for fault in verify(folder).faults] == [str(table)]


def test_regrading_what_was_scored_elsewhere_asks_for_a_reward(imported: Importer) -> None:
    folder = imported([row(reward=1), row(answer="3", reward=0)])
    root = str(Path(folder.uri).parent)
    with pytest.raises(ValueError, match="'foreign' were scored elsewhere, .* what to score them now, with --reward"):
        asyncio.run(regrade_run("foreign", root, reward=None, steps="", threshold=0.5))
    found = asyncio.run(regrade_run("foreign", root, reward=RewardSection(name="exact"), steps="", threshold=0.5))
    assert (found.samples, found.flips) == (2, 0)


@pytest.mark.parametrize(
    ("lost", "problem"), [(0, ""), (1, "group 000000-0-0000 has 2 samples, and 3 in run 'foreign'")]
)
def test_a_group_that_was_taken_has_as_many_samples_as_in_the_run_it_is_from(
    imported: Importer, lost: int, problem: str
) -> None:
    source = imported([row(answer=str(number)) for number in (1, 2, 3)] + [row("2+2=")])
    commit = StepStore(source.step(0), "foreign", 0).stored(Slot("generate", 0, 0))
    assert commit is not None
    table = read_table(commit.tables["rollouts"]).slice(lost)
    taken = Taken("foreign", 0, "", "", {"rollouts": commit.tables["rollouts"].digest})
    slot, entry = ("generate", 0, 0), {"slot": commit.slot, "record": {TAKEN: asdict(taken)}}
    stored = StoredStep(0, "", None, None, {slot: entry}, {slot: {"rollouts": ("mine.parquet", table)}})
    found = check_taken(runs.run_folder(str(Path(source.uri).parent), "child"), stored)
    assert samples_vary(stored) and [fault.file for fault in found] == ["mine.parquet"] * lost
    assert all(problem in fault.problem for fault in found)


def test_a_run_is_imported_to_where_a_store_is(tmp_path: Path, model_dir: str) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text(to_json(row(reward=1)))
    wanted = Import(file=str(file), run="far", root="memory://imported", model=model_dir)
    asyncio.run(import_run(wanted))
    assert verify(runs.run_folder("memory://imported", "far")).faults == []
    with pytest.raises(FileExistsError, match="already exists"):
        asyncio.run(import_run(replace(wanted)))
