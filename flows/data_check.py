"""What a prompt set holds, before a run takes it: rows, repetitions, labels, lengths, and what another set has of it.

It reads the set as a run does, row by row, and goes on where a run would stop.
"""

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from milepost.storage.contamination import Index, asked, index, whole_hash, words
from milepost.storage.data_sets import dataset_name
from milepost.storage.messages import Messages
from milepost.storage.parameters import DataSection, RewardSection
from milepost.storage.prompt_rows import Prompt, RowReader, Tokenizer, Tools
from milepost.storage.prompt_source import BadLine, RawRow, parse_path, read_batches, read_rows
from milepost.storage.text import from_json
from milepost.tasks.labels import LabelCheck

EXAMPLES = 10
BINS = 24

Ask = LabelCheck | None


class Characters:
    """Stands in for a tokenizer where no model is named: a token for every character."""

    def render(self, messages: Messages | str, tools: Tools | None = None) -> list[int]:
        return [0] * len(messages if isinstance(messages, str) else "\n".join(_texts(messages)))

    def encode(self, text: str) -> list[int]:
        return [0] * len(text)


def _texts(messages: Messages) -> Iterator[str]:
    return (str(message.get("content") or "") for message in messages)


@dataclass
class Found:
    """How many rows are of a kind, and the first of them with what is to be said of each."""

    count: int = 0
    examples: list[dict[str, Any]] = field(default_factory=list)

    def add(self, row: int, **said: Any) -> None:
        self.count += 1
        if len(self.examples) < EXAMPLES:
            self.examples.append({"row": row, **said})


@dataclass
class DataReport:
    """What a check found. `rows` are all there are; `digest` is that of the sound ones in their order, as of a run.

    `duplicates` repeat an earlier row in all it says, `repeated` only its normalised text. `overlap` rows are also in
    the set `against`: with the `same` normalised text, or with 13 words in a row.
    """

    path: str
    rows: int = 0
    digest: str = ""
    malformed: Found = field(default_factory=Found)
    unusable_labels: Found = field(default_factory=Found)
    duplicates: Found = field(default_factory=Found)
    repeated: Found = field(default_factory=Found)
    unit: str = "characters"
    lengths: dict[str, float] = field(default_factory=dict)
    histogram: dict[str, list[float]] = field(default_factory=dict)
    reward: str = ""
    against: str = ""
    same: int = 0
    overlap: Found = field(default_factory=Found)

    @property
    def is_faulty(self) -> bool:
        return bool(self.malformed.count or self.unusable_labels.count or self.overlap.count)


def check_data(
    data: DataSection,
    *,
    tokenizer: Tokenizer | None = None,
    reward: RewardSection | None = None,
    against: str = "",
) -> DataReport:
    """Read the set of `data` to its end. ValueError when there is none, or one of those to compare with is none."""
    name = dataset_name(parse_path(data.path)[0])
    reader = RowReader(data, tokenizer or Characters(), name)
    report = DataReport(data.path, unit="tokens" if tokenizer else "characters", against=against)
    report.reward = reward.name if reward else ""
    seen = _Seen(index(_asked_of(data, against)) if against else None)
    ids, lengths = hashlib.sha256(), array("I")
    labels: AbstractContextManager[Ask] = LabelCheck(reward) if reward else nullcontext()
    with labels as check:
        for rows in read_batches(data.path):
            report.rows += len(rows)
            for prompt in _sound(reader, rows, check, report):
                ids.update(("\n" if lengths else "").encode() + prompt.prompt_id.encode())
                lengths.append(len(prompt.prompt_token_ids))
                seen.add(prompt, report)
    report.digest = ids.hexdigest()
    if lengths:
        report.lengths, report.histogram = _statistics(np.frombuffer(lengths, dtype=np.uint32))
    return report


def _sound(reader: RowReader, rows: Sequence[RawRow | BadLine], check: Ask, report: DataReport) -> list[Prompt]:
    """The prompts of some rows that a run would take; the rest goes into the report."""
    prompts: list[Prompt] = []
    for row in rows:
        read = row if isinstance(row, BadLine) else reader.read(row)
        if isinstance(read, BadLine):
            report.malformed.add(read.row, line=read.line, reason=read.reason)
        else:
            prompts.append(read)
    if check is None:
        return prompts
    problems = check([(from_json(prompt.label), from_json(prompt.metadata)) for prompt in prompts])
    for prompt, problem in zip(prompts, problems, strict=True):
        if problem:
            report.unusable_labels.add(prompt.row, reason=problem)
    return [prompt for prompt, problem in zip(prompts, problems, strict=True) if not problem]


class _Seen:
    """What the rows before said, and what the other set says."""

    def __init__(self, other: Index | None) -> None:
        self._other = other
        self._ids: dict[bytes, int] = {}
        self._texts: dict[int, int] = {}

    def add(self, prompt: Prompt, report: DataReport) -> None:
        found = words(asked(from_json(prompt.prompt)))
        before = self._ids.setdefault(bytes.fromhex(prompt.prompt_id), prompt.row)
        alike = self._texts.setdefault(whole_hash(found), prompt.row) if found else prompt.row
        if before != prompt.row:
            report.duplicates.add(prompt.row, repeats=before)
        elif alike != prompt.row:
            report.repeated.add(prompt.row, repeats=alike)
        if self._other is None:
            return
        same = self._other.same(found)
        near = same if same is not None else self._other.shares(found)
        report.same += same is not None
        if near is not None:
            report.overlap.add(prompt.row, other=near, shares="all" if same is not None else "13 words")


def _asked_of(data: DataSection, path: str) -> Iterable[tuple[int, str]]:
    """What the sound rows of another set ask, by the same keys."""
    reader = RowReader(data.model_copy(update={"path": path}), Characters(), "")
    for row in read_rows(path):
        read = row if isinstance(row, BadLine) else reader.read(row)
        if isinstance(read, BadLine):
            raise ValueError(f"{path} {read.place}: {read.reason}")
        yield read.row, asked(from_json(read.prompt))


def _statistics(lengths: Any) -> tuple[dict[str, float], dict[str, list[float]]]:
    quantiles = {"min": 0.0, "median": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    found = {name: float(np.quantile(lengths, share)) for name, share in quantiles.items()}
    counts, edges = np.histogram(lengths, bins=min(BINS, int(np.ptp(lengths)) + 1))
    return found | {"mean": float(lengths.mean())}, {"counts": counts.tolist(), "edges": edges.tolist()}
