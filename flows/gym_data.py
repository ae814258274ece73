"""Prompt sets of reasoning-gym's tasks, with what their verifiers need."""

import dataclasses
import importlib
import json
from collections.abc import Mapping
from typing import Any

from milepost.flows.data import Summary, check_size, json_entry, row_of, write_prompts
from milepost.storage.prompt_source import RawRow, read_rows
from milepost.storage.registry import nearest

EXAMPLES_SEED = 2**31  # far from others: a generator's problem i of seed s is its problem i - 1 of seed s + 1


def make_reasoning_gym(
    task: str,
    size: int,
    seed: int,
    out: str,
    *,
    shots: int = 0,
    text: bool = False,
    without: str = "",
    **config: Any,
) -> Summary:
    """Write `size` problems of a reasoning-gym task to `out` (.parquet or .jsonl). `config` is the task's own.

    `shots` solved problems come before each, as earlier turns, or with `text` in one string for models that are given
    no chat template. No problem of the set `without` is asked. Each row's metadata is
    `{"dataset": task, "entry": {...}}`, what the task's `score_answer` needs. LookupError for an unknown task;
    ValueError when a problem would be scored differently once it has been stored.
    """
    check_size(size)
    solved = _solved_examples(task, shots, config)
    taken = {question for question, _ in solved} | (_questions(without) if without else set())
    dataset = _create(task, size=2 * size + len(taken) if taken else size, seed=seed, **config)
    score = _stored_scorer(task)
    rows: list[dict[str, Any]] = []
    for entry in (dataset[index] for index in range(dataset.size)):
        if len(rows) == size:
            break
        if entry["question"] in taken:
            continue
        stored = json_entry(entry)
        if stored["answer"] is not None and score(stored["answer"], stored) != dataset.score_answer(
            entry["answer"], entry
        ):
            raise ValueError(
                f"problems of {task!r} cannot be stored as JSON without changing their score: take another"
            )
        prompt = _asked(solved, entry["question"], text=text)
        rows.append(row_of(prompt, stored["answer"], {"dataset": task, "entry": stored}))
    if len(rows) < size:
        raise ValueError(f"task {task!r} has {len(rows)} of {size} problems that are not taken: widen its options")
    return write_prompts(rows, out)


def _solved_examples(task: str, shots: int, config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Questions with their answers, the same for every seed: whatever set they stand in, prompts begin alike."""
    if not shots:
        return []
    dataset = _create(task, size=shots, seed=EXAMPLES_SEED, **config)
    return [(dataset[index]["question"], str(dataset[index]["answer"])) for index in range(shots)]


def _asked(solved: list[tuple[str, str]], question: str, *, text: bool) -> str | list[dict[str, str]]:
    if text:
        return "".join(f"{asked} {answer}\n" for asked, answer in solved) + question
    turns = [pair for asked, answer in solved for pair in (("user", asked), ("assistant", answer))]
    return [{"role": role, "content": content} for role, content in [*turns, ("user", question)]]


def _questions(uri: str) -> set[str]:
    """The questions of a prompt set of reasoning-gym."""
    rows = [row.value for row in read_rows(uri) if isinstance(row, RawRow)]
    metadata = [json.loads(row["metadata"]) if isinstance(row["metadata"], str) else row["metadata"] for row in rows]
    return {found["entry"]["question"] for found in metadata}


def _gym() -> Any:
    try:
        return importlib.import_module("reasoning_gym")
    except ImportError:
        raise ValueError("reasoning-gym is not installed: pip install 'milepost[envs]'") from None


def _create(task: str, **config: Any) -> Any:
    known = _gym().factory.DATASETS
    if task not in known:
        raise LookupError(f"unknown reasoning-gym task {task!r}{nearest(task, list(known))}; known: {sorted(known)}")
    fields = [field.name for field in dataclasses.fields(known[task][1])]
    for name in config:
        if name not in fields:
            raise ValueError(f"task {task!r} has no option {name!r}{nearest(name, fields)}; known: {sorted(fields)}")
    try:
        return _gym().create_dataset(task, **config)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"task {task!r} refuses its options {config}: {error}") from error


def _stored_scorer(task: str) -> Any:
    """How a reward will score the task: from its name alone, without the options it was made with."""
    try:
        return _gym().get_score_answer_fn(task)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"task {task!r} cannot be scored from its name alone ({error}): take another") from error
