"""Prompt sets that are made, not downloaded, as files, and arithmetic for small models.

A file is published whole, and made again only into the same bytes.
"""

import hashlib
import io
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import pyarrow as pa
import pyarrow.parquet as pq

from milepost.storage import files
from milepost.storage.text import to_json

HELD_OUT_OF_TEN = 2
OPERATORS = "+-*"
Split = Literal["train", "held_out"]
_SHARES = {"+": 0.45, "-": 0.35, "*": 0.2}


@dataclass(frozen=True)
class Summary:
    """A prompt set as written: where, how many rows, how many of them repeat an earlier one, SHA-256 of the file."""

    uri: str
    rows: int
    duplicates: int
    digest: str


@dataclass(frozen=True)
class Problem:
    """`prompt` as "12+7=", `label` as "19", and `solution`, the whole response that supervised warm-up trains on."""

    prompt: str
    label: str
    solution: str


def json_entry(value: Any) -> Any:
    """`value` in JSON's types: tuples become lists, numbers of any library plain ones, keys and the rest text."""
    if isinstance(value, Mapping):
        return {str(key): json_entry(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_entry(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((json_entry(item) for item in value), key=files.canonical_json)
    if hasattr(value, "tolist"):  # numpy's arrays and scalars
        return json_entry(value.tolist())
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    return str(value)


def split_of(name: str) -> Split:
    """The split called `name`; ValueError when there is none."""
    if name not in get_args(Split):
        raise ValueError(f"split is {name!r}, it must be one of {', '.join(get_args(Split))}")
    return cast(Split, name)


def make_arithmetic(
    size: int, seed: int, *, out: str, split: Split = "train", digits: int = 2, operators: str = OPERATORS
) -> Summary:
    """Write `size` different arithmetic problems to `out`; whatever the seeds, no problem is in both splits."""
    check_size(size)
    counts = (size, 0) if split == "train" else (0, size)
    train, held_out = arithmetic_problems(counts[0], seed, held_out=counts[1], digits=digits, operators=operators)
    rows = [row_of(problem.prompt, problem.label, {"solution": problem.solution}) for problem in [*train, *held_out]]
    return write_prompts(rows, out)


def arithmetic_problems(
    count: int, seed: int, *, held_out: int, digits: int = 2, operators: str = OPERATORS
) -> tuple[list[Problem], list[Problem]]:
    """`count` problems to train on and `held_out` others, all different.

    Two tenths of all problems, chosen by a hash of their text, are only ever held out. Operands have up to `digits`
    digits, multiplications one factor of one digit; differences are not negative.
    """
    splits: tuple[dict[str, list[str]], dict[str, list[str]]] = ({}, {})
    for operator, texts in _all_texts(digits, operators).items():
        for split in splits:
            split[operator] = []
        for text in texts:
            splits[_number(text) % 10 < HELD_OUT_OF_TEN][operator].append(text)
    return _draw(splits[0], count, seed, "train"), _draw(splits[1], held_out, seed, "held-out")


def _all_texts(digits: int, operators: str) -> dict[str, list[str]]:
    if not operators or not set(operators) <= set(OPERATORS):
        raise ValueError(f"operators is {operators!r}, it must be some of {OPERATORS!r}")
    if not 1 <= digits <= 3:
        raise ValueError(f"digits is {digits}, problems have operands of 1 to 3 digits")
    operands = range(10 ** (digits - 1), 10**digits)
    seconds = {"+": lambda a: range(1, 10**digits), "-": lambda a: range(1, a + 1), "*": lambda a: range(2, 10)}
    return {
        sign: [f"{a}{sign}{b}=" for a in operands for b in seconds[sign](a)] for sign in OPERATORS if sign in operators
    }


def _draw(texts: dict[str, list[str]], count: int, seed: int, split: str) -> list[Problem]:
    """`count` of the texts in the shares of their operators; an operator that runs out is made up for by the others."""
    available = sum(map(len, texts.values()))
    if not 0 <= count <= available:
        raise ValueError(f"{count} {split} problems were asked for, between 0 and {available} can be had")
    shuffled = {operator: sorted(group, key=lambda text: _number(text, seed)) for operator, group in texts.items()}
    whole = sum(_SHARES[operator] for operator in texts)
    chosen: list[str] = []
    spare: list[str] = []
    for operator, group in shuffled.items():
        quota = round(count * _SHARES[operator] / whole)
        chosen += group[:quota]
        spare += group[quota:]
    chosen = (chosen + spare)[:count]
    return [_solved(text) for text in sorted(chosen, key=lambda text: _number(text, seed))]


def _number(text: str, seed: int | None = None) -> int:
    """A number that depends on text and seed alone, on every platform."""
    salted = text if seed is None else f"{seed} {text}"
    return int.from_bytes(hashlib.blake2b(salted.encode(), digest_size=8).digest(), "big")


def _solved(text: str) -> Problem:
    operator = next(sign for sign in _SHARES if sign in text)
    left, right = (int(number) for number in text.removesuffix("=").split(operator))
    answer = str({"+": left + right, "-": left - right, "*": left * right}[operator])
    return Problem(text, answer, answer)


def check_size(size: int) -> None:
    if size < 1:
        raise ValueError(f"size is {size}, a prompt set has at least 1 row")


def row_of(prompt: str | list[dict[str, str]], label: str | None, metadata: dict[str, Any]) -> dict[str, Any]:
    return {"prompt": prompt, "label": label, "metadata": metadata}


def write_prompts(rows: Sequence[dict[str, Any]], out: str) -> Summary:
    """Publish rows of prompt, label and metadata as `out`; ValueError when `out` holds something else already."""
    if out.endswith(".jsonl"):
        data = "".join(to_json(row) + "\n" for row in rows).encode()
    elif out.endswith(".parquet"):
        data = _parquet(rows)
    else:
        raise ValueError(f"out {out!r} must end in .parquet or .jsonl")
    try:
        files.publish(out, data)
    except files.AlreadyPublished:
        if files.read(out) != data:
            raise ValueError(f"{out} exists with other content: remove it or choose another name") from None
    different = {files.canonical_json(row) for row in rows}
    return Summary(out, len(rows), len(rows) - len(different), files.digest_of(data))


def _parquet(rows: Sequence[dict[str, Any]]) -> bytes:
    """Metadata as JSON text: as a struct, every row would get the keys of all others."""
    columns = {
        "prompt": pa.array([row["prompt"] for row in rows]),
        "label": pa.array([row["label"] for row in rows], pa.string()),
        "metadata": pa.array([to_json(row["metadata"]) for row in rows], pa.string()),
    }
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink, compression="zstd", write_page_checksum=True)
    return sink.getvalue()
