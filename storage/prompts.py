"""Prompt sets: rows of files as prompts with token ids, and an exact account of the rows that are not served.

Rows become columns of a table a batch at a time, so that a large set is in memory once, as Arrow holds it.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from milepost.storage import files
from milepost.storage.data_sets import Source, sources
from milepost.storage.messages import as_text
from milepost.storage.parameters import DataSection
from milepost.storage.prompt_mixture import Share
from milepost.storage.prompt_rows import Prompt, RowReader, Tokenizer
from milepost.storage.prompt_source import BadLine, RawRow, parse_path, read_batches, read_rows
from milepost.storage.registry import nearest
from milepost.storage.schema import PROMPTS
from milepost.storage.text import from_json, to_json

CheckLabels = Callable[[Sequence[tuple[Any, dict[str, Any]]]], Sequence[str]]
"""Of labels with the metadata of their prompts: why each cannot be graded; empty for one that can."""


@dataclass(frozen=True)
class PromptSet:
    """The prompts that can be served, in schema PROMPTS and not yet served, and how many rows cannot.

    `digest` is of the contents in their order. `duplicates` counts prompts that equal an earlier one; they are served.
    `shares` are the sets of a mixture, one behind the other in the table; a single set has none.
    """

    table: pa.Table
    digest: str
    too_long: int
    bad_lines: int
    duplicates: int
    shares: tuple[Share, ...] = ()

    def __len__(self) -> int:
        return int(self.table.num_rows)

    @property
    def prompts(self) -> list[Prompt]:
        """Every prompt as a record: for small sets."""
        return [Prompt(**row) for row in self.table.select(list(Prompt.__dataclass_fields__)).to_pylist()]

    @property
    def too_long_share(self) -> float:
        """The share of sound rows that do not fit."""
        return self.too_long / (len(self) + self.too_long)


@dataclass
class _Loaded:
    """One set as far as it is read."""

    batches: list[pa.RecordBatch] = field(default_factory=list)
    bad: list[BadLine] = field(default_factory=list)
    too_long: int = 0
    shortest: int | None = None
    keys: set[str] = field(default_factory=set)

    @property
    def rows(self) -> int:
        return sum(batch.num_rows for batch in self.batches)


def load_prompts(
    data: DataSection,
    tokenizer: Tokenizer,
    *,
    context_length: int,
    quarantine_uri: str | None = None,
    check_labels: CheckLabels | None = None,
) -> PromptSet:
    """Read and tokenize the prompt sets of `data`; ValueError says which file and line is wrong, and why.

    A prompt of `context_length` tokens or more leaves no room for a response and is set aside, and so is one that is
    longer than `data.max_prompt_tokens`. With `data.on_bad_line="quarantine"` bad lines, and labels that `check_labels`
    finds fault with, are counted and, as JSON lines of file, line, reason and text, written to `quarantine_uri`.
    """
    if data.system_prompt and not data.apply_chat_template:
        raise ValueError("data.system_prompt needs data.apply_chat_template: put it into the prompts instead")
    found = sources(data)
    loaded = [_load(source, tokenizer, context_length, check_labels) for source in found]
    bad = [
        (parse_path(source.data.path)[0], line) for source, one in zip(found, loaded, strict=True) for line in one.bad
    ]
    if bad and quarantine_uri is not None:
        files.publish(quarantine_uri, _quarantined(bad), overwrite=True)
    shares = tuple(
        Share(source.name, one.rows, source.weight, one.too_long, len(one.bad))
        for source, one in zip(found, loaded, strict=True)
    )
    return _counted(
        pa.Table.from_batches([batch for one in loaded for batch in one.batches], PROMPTS),
        too_long=sum(one.too_long for one in loaded),
        bad_lines=len(bad),
        shares=shares if data.sets else (),
    )


def stored_prompts(table: pa.Table, *, too_long: int, bad_lines: int, shares: tuple[Share, ...] = ()) -> PromptSet:
    """The set that a run has stored, with the counts of what it set aside."""
    return _counted(table, too_long=too_long, bad_lines=bad_lines, shares=shares)


def _load(source: Source, tokenizer: Tokenizer, context_length: int, check_labels: CheckLabels | None) -> _Loaded:
    data, loaded = source.data, _Loaded()
    uri, _ = parse_path(data.path)
    reader = RowReader(data, tokenizer, source.name, source.reward)
    limit = min(context_length - 1, data.max_prompt_tokens or context_length)
    for rows in read_batches(data.path):
        loaded.keys.update(key for row in rows if isinstance(row, RawRow) for key in row.value)
        sound, bad = _read(reader, rows, check_labels)
        if bad and data.on_bad_line == "stop":
            _check_keys(uri, _all_keys(data.path), data)
            raise ValueError(f"{uri} {bad[0].place}: {bad[0].reason}")
        loaded.bad += bad
        _add(loaded, sound, limit)
    _check_keys(uri, loaded.keys, data)
    _check_served(uri, loaded, limit, context_length)
    return loaded


def _read(
    reader: RowReader, rows: Sequence[RawRow | BadLine], check_labels: CheckLabels | None
) -> tuple[list[Prompt], list[BadLine]]:
    """The prompts among some rows, and what is none; both in the order of the rows."""
    read = [row if isinstance(row, BadLine) else reader.read(row) for row in rows]
    places = [place for place, found in enumerate(read) if isinstance(found, Prompt)]
    if check_labels is not None and places:
        asked = [(found.label, found.metadata) for found in read if isinstance(found, Prompt)]
        problems = check_labels([(from_json(label), from_json(metadata)) for label, metadata in asked])
        for place, problem in zip(places, problems, strict=True):
            row = rows[place]
            if problem and isinstance(row, RawRow):
                read[place] = BadLine(row.row, row.line, problem, as_text(row.value))
    sound = [found for found in read if isinstance(found, Prompt)]
    return sound, [found for found in read if isinstance(found, BadLine)]


def _add(loaded: _Loaded, prompts: Sequence[Prompt], limit: int) -> None:
    """What fits, as columns."""
    fitting = [prompt for prompt in prompts if len(prompt.prompt_token_ids) <= limit]
    loaded.too_long += len(prompts) - len(fitting)
    lengths = [len(prompt.prompt_token_ids) for prompt in prompts]
    loaded.shortest = min([*lengths, *([] if loaded.shortest is None else [loaded.shortest])], default=None)
    if fitting:
        loaded.batches.append(_batch(fitting))


def _batch(prompts: Sequence[Prompt]) -> pa.RecordBatch:
    """Prompts in schema PROMPTS, not yet served: every group id is empty, every epoch 0."""
    unserved = {"group_id": [""] * len(prompts), "epoch": [0] * len(prompts)}
    columns = [
        pa.array(unserved.get(column.name) or [getattr(prompt, column.name) for prompt in prompts], column.type)
        for column in PROMPTS
    ]
    return pa.RecordBatch.from_arrays(columns, schema=PROMPTS)


def _all_keys(path: str) -> set[str]:
    return {key for row in read_rows(path) if isinstance(row, RawRow) for key in row.value}


def _check_keys(uri: str, seen: set[str], data: DataSection) -> None:
    """A column that no row has is a mistake in the parameters, not in the rows. All but the prompt may be absent."""
    for name in ("input_key", "label_key", "metadata_key", "tools_key"):
        key = getattr(data, name)
        optional = name != "input_key" and key == DataSection.model_fields[name].default
        if seen and key not in seen and not optional:
            hint = nearest(key, sorted(seen))
            raise ValueError(f"{uri}: no row has data.{name} {key!r}{hint}; keys found: {sorted(seen)}")


def _check_served(uri: str, loaded: _Loaded, limit: int, context_length: int) -> None:
    if loaded.shortest is None:
        first = loaded.bad[0]
        raise ValueError(f"{uri} has no usable row, and the first is {first.place}: {first.reason}")
    if not loaded.batches:
        found = f"{uri}: all {loaded.too_long} prompts are too long, the shortest has {loaded.shortest} tokens and the "
        if limit < context_length - 1:
            raise ValueError(f"{found}limit is {limit}: raise data.max_prompt_tokens to {loaded.shortest} or more")
        raise ValueError(f"{found}context {context_length}: raise model.context_length above {loaded.shortest}")


def _counted(table: pa.Table, *, too_long: int, bad_lines: int, shares: tuple[Share, ...]) -> PromptSet:
    different = pc.count_distinct(table["prompt_id"]).as_py()
    return PromptSet(table, ids_digest(table), too_long, bad_lines, table.num_rows - different, shares)


def ids_digest(table: pa.Table) -> str:
    """SHA-256 of the ids of prompts in their order, a line each."""
    digest = hashlib.sha256()
    for place, chunk in enumerate(chunk for chunk in table["prompt_id"].chunks if len(chunk)):
        digest.update((("\n" if place else "") + "\n".join(chunk.to_pylist())).encode())
    return digest.hexdigest()


def _quarantined(bad: Sequence[tuple[str, BadLine]]) -> bytes:
    lines = [
        {"file": uri, "line": one.line, "row": one.row, "reason": one.reason, "text": one.text} for uri, one in bad
    ]
    return "".join(to_json(line) + "\n" for line in lines).encode()
