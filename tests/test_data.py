"""Prompt sets that are made: their rows are read as written, and their verifiers agree with their answers."""

import decimal
import fractions
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reasoning_gym
from hypothesis import given, settings
from hypothesis import strategies as st

from milepost.flows.data import arithmetic_problems, json_entry, make_arithmetic, write_prompts
from milepost.flows.gym_data import make_reasoning_gym
from milepost.storage.parameters import DataSection
from milepost.storage.prompts import PromptSet, load_prompts

TASKS = ["chain_sum", "leg_counting", "complex_arithmetic", "countdown", "knights_knaves", "mini_sudoku", "word_ladder"]


class Characters:
    def render(self, messages: list[dict[str, Any]] | str) -> list[int]:
        return [1]

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]


def load(uri: str, *, template: bool = True) -> PromptSet:
    data = DataSection(path=uri, apply_chat_template=template)
    return load_prompts(data, Characters(), context_length=1000)


@pytest.mark.parametrize("task", TASKS)
def test_a_tasks_own_verifier_gives_the_stored_answer_full_marks(tmp_path: Path, task: str) -> None:
    summary = make_reasoning_gym(task, 3, 1, str(tmp_path / "set.parquet"))
    score = reasoning_gym.get_score_answer_fn(task)
    for prompt in load(summary.uri).prompts:
        metadata = json.loads(prompt.metadata)
        assert metadata["dataset"] == task
        assert score(json.loads(prompt.label), metadata["entry"]) == 1.0
        assert score("no such answer", metadata["entry"]) < 1.0


def test_jsonl_and_parquet_hold_the_same_prompts(tmp_path: Path) -> None:
    sets = [load(make_reasoning_gym("chain_sum", 5, 1, str(tmp_path / name)).uri) for name in ("a.jsonl", "a.parquet")]
    assert sets[0].digest == sets[1].digest and len(sets[0]) == 5
    assert json.loads(sets[0].prompts[0].prompt)[0]["role"] == "user"


def test_options_of_the_task_are_passed_on(tmp_path: Path) -> None:
    made = make_reasoning_gym("chain_sum", 3, 1, str(tmp_path / "a.jsonl"), min_terms=2, max_terms=2)
    entries = [json.loads(prompt.metadata)["entry"] for prompt in load(made.uri).prompts]
    assert {entry["metadata"]["num_terms"] for entry in entries} == {2}


def test_a_held_out_set_shares_no_problem_with_the_one_to_train_on(tmp_path: Path) -> None:
    easy = {"min_terms": 2, "max_terms": 2, "max_digits": 1}
    train = make_reasoning_gym("chain_sum", 40, 0, str(tmp_path / "train.parquet"), **easy)
    held_out = make_reasoning_gym("chain_sum", 20, 1, str(tmp_path / "held_out.jsonl"), without=train.uri, **easy)
    asked = [{prompt.prompt for prompt in load(made.uri).prompts} for made in (train, held_out)]
    assert not asked[0] & asked[1]
    digits = {"min_terms": 1, "max_terms": 1, "max_digits": 1}
    all_ten = make_reasoning_gym("chain_sum", 200, 0, str(tmp_path / "digits.jsonl"), **digits)
    with pytest.raises(ValueError, match="has 0 of 3 problems that are not taken"):
        make_reasoning_gym("chain_sum", 3, 1, str(tmp_path / "more.jsonl"), without=all_ten.uri, **digits)


def test_solved_problems_come_before_each_as_turns_or_as_text(tmp_path: Path) -> None:
    turns = make_reasoning_gym("chain_sum", 2, 0, str(tmp_path / "turns.jsonl"), shots=2)
    text = make_reasoning_gym("chain_sum", 2, 9, str(tmp_path / "text.jsonl"), shots=2, text=True)
    messages = json.loads(load(turns.uri).prompts[0].prompt)
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2 + ["user"]
    lines = json.loads(load(text.uri, template=False).prompts[0].prompt).split("\n")
    assert lines[0] == f"{messages[0]['content']} {messages[1]['content']}" and lines[2].endswith("=")


@pytest.mark.parametrize(
    ("task", "config", "error", "message"),
    [
        ("chain_summ", {}, LookupError, "unknown reasoning-gym task 'chain_summ', did you mean 'chain_sum'"),
        ("chain_sum", {"min_term": 2}, ValueError, "has no option 'min_term', did you mean 'min_terms'"),
        ("chain_sum", {"min_terms": 9, "max_terms": 2}, ValueError, "refuses its options .*max_terms must be >="),
        ("composite", {}, ValueError, "refuses its options"),
        ("rearc", {}, ValueError, "cannot be stored as JSON without changing their score"),
    ],
)
def test_what_cannot_be_made_is_one_sentence(
    tmp_path: Path, task: str, config: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make_reasoning_gym(task, 2, 1, str(tmp_path / "a.jsonl"), **config)


def test_values_of_any_library_become_json() -> None:
    value = {
        1: (np.int64(2), np.float32(0.5), np.str_("s")),
        "array": np.arange(3),
        "exact": [decimal.Decimal("1.10"), fractions.Fraction(1, 3), 2 + 1j],
        "set": {3, 1, 2},
        "plain": [None, True, 1, 1.5, "t"],
    }
    assert json.loads(json.dumps(json_entry(value))) == {
        "1": [2, 0.5, "s"],
        "array": [0, 1, 2],
        "exact": ["1.10", "1/3", "(2+1j)"],
        "set": [1, 2, 3],
        "plain": [None, True, 1, 1.5, "t"],
    }


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 300), st.integers(0, 300), st.integers(0, 2**40), st.integers(1, 2))
def test_every_problem_is_right_and_none_repeats(count: int, held_out: int, seed: int, digits: int) -> None:
    if digits == 1:
        count, held_out = count % 80, held_out % 20
    train, held = arithmetic_problems(count, seed, held_out=held_out, digits=digits)
    problems = [*train, *held]
    assert (len(train), len(held)) == (count, held_out)
    assert len({problem.prompt for problem in problems}) == len(problems)
    assert all(str(eval(problem.prompt[:-1])) == problem.label == problem.solution for problem in problems)


def test_held_out_problems_are_never_trained_on_under_any_seed() -> None:
    trained = {problem.prompt for seed in range(5) for problem in arithmetic_problems(5000, seed, held_out=0)[0]}
    held = {problem.prompt for seed in range(5) for problem in arithmetic_problems(0, seed, held_out=1000)[1]}
    assert not trained & held


def test_seeds_differ_and_one_seed_is_always_the_same() -> None:
    first, again, other = (arithmetic_problems(50, seed, held_out=5) for seed in (0, 0, 1))
    assert first == again != other
    assert {sign for problem in first[0] for sign in "+-*" if sign in problem.prompt} == {"+", "-", "*"}


def test_an_arithmetic_set_is_read_as_strings(tmp_path: Path) -> None:
    train = make_arithmetic(20, 0, out=str(tmp_path / "train.parquet"))
    held = make_arithmetic(5, 0, out=str(tmp_path / "held.jsonl"), split="held_out")
    found, others = load(train.uri, template=False), load(held.uri, template=False)
    assert (len(found), len(others), found.duplicates) == (20, 5, 0)
    assert json.loads(found.prompts[0].prompt).endswith("=")
    assert not {prompt.prompt_id for prompt in found.prompts} & {prompt.prompt_id for prompt in others.prompts}


@pytest.mark.parametrize(
    ("count", "held_out", "digits", "message"),
    [
        (10**6, 0, 2, r"1000000 train problems were asked for, between 0 and \d+ can be had"),
        (0, 10**6, 2, "1000000 held-out problems"),
        (-1, 0, 2, "-1 train problems"),
        (1, 0, 4, "digits is 4"),
    ],
)
def test_more_problems_than_there_are_is_an_error(count: int, held_out: int, digits: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        arithmetic_problems(count, 0, held_out=held_out, digits=digits)


def test_a_file_is_made_again_only_into_the_same_bytes(tmp_path: Path) -> None:
    out = str(tmp_path / "a.parquet")
    assert make_arithmetic(5, 0, out=out) == make_arithmetic(5, 0, out=out)
    with pytest.raises(ValueError, match="exists with other content"):
        make_arithmetic(5, 1, out=out)


def test_a_file_of_no_known_kind_and_a_set_of_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must end in \.parquet or \.jsonl"):
        write_prompts([{"prompt": "a", "label": "b", "metadata": {}}], str(tmp_path / "a.csv"))
    with pytest.raises(ValueError, match="size is 0"):
        make_arithmetic(0, 0, out=str(tmp_path / "a.jsonl"))
