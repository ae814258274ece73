"""Prompt sets: rows of a file as prompts with token ids, and an exact account of the rows that are not served.

A prompt is identified by what it says (prompt, label, metadata): moving, slicing or renaming a file keeps identities.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import pyarrow as pa

from milepost.storage import files
from milepost.storage.messages import Messages, Unusable, as_text, checked_message, shown
from milepost.storage.parameters import DataSection
from milepost.storage.prompt_source import EXTENSIONS, BadLine, RawRow, parse_json, parse_path, read_rows
from milepost.storage.redaction import masked_text
from milepost.storage.registry import nearest
from milepost.storage.schema import PROMPTS
from milepost.storage.text import encodable, to_json


class Tokenizer(Protocol):
    """What prompts need of a tokenizer. The text it is given is valid Unicode."""

    def render(self, messages: Messages | str) -> list[int]:
        """Token ids of the chat template up to where the answer begins; a string is one user message.

        ValueError when the template refuses the messages.
        """
        ...

    def encode(self, text: str) -> list[int]: ...


@dataclass(frozen=True)
class Prompt:
    """One row. `prompt`, `label` and `metadata` are JSON; `row` is its position in the file, for people."""

    prompt_id: str
    dataset: str
    row: int
    prompt: str
    prompt_token_ids: list[int]
    label: str
    metadata: str


@dataclass(frozen=True)
class PromptSet:
    """The prompts that can be served, and how many rows cannot.

    `digest` is of the contents in their order. `duplicates` counts prompts that equal an earlier one; they are served.
    """

    prompts: tuple[Prompt, ...]
    digest: str
    too_long: int
    bad_lines: int
    duplicates: int

    def __len__(self) -> int:
        return len(self.prompts)

    @cached_property
    def table(self) -> pa.Table:
        """The set in schema PROMPTS, in its order and not yet served: every group id is empty, every epoch 0."""
        columns = {
            field.name: pa.array([getattr(prompt, field.name) for prompt in self.prompts], field.type)
            for field in PROMPTS
            if field.name not in ("group_id", "epoch")
        }
        columns["group_id"] = pa.array([""] * len(self), pa.string())
        columns["epoch"] = pa.array([0] * len(self), pa.int32())
        return pa.table([columns[name] for name in PROMPTS.names], schema=PROMPTS)

    @property
    def too_long_share(self) -> float:
        """The share of sound rows that do not fit the context."""
        return self.too_long / (len(self.prompts) + self.too_long)


def load_prompts(
    data: DataSection, tokenizer: Tokenizer, *, context_length: int, quarantine_uri: str | None = None
) -> PromptSet:
    """Read and tokenize the prompt set of `data`; ValueError says which file and line is wrong, and why.

    A prompt of `context_length` tokens or more leaves no room for a response and is set aside. With
    `data.on_bad_line="quarantine"` bad lines are counted and, as JSON lines of file, line, reason and text, written to
    `quarantine_uri`.
    """
    uri, _ = parse_path(data.path)
    found: list[Prompt] = []
    bad: list[BadLine] = []
    rows = list(read_rows(data.path))
    _check_keys(uri, [row.value for row in rows if isinstance(row, RawRow)], data)
    for row in rows:
        read = row if isinstance(row, BadLine) else _read_row(row, data, tokenizer, dataset_name(uri))
        if isinstance(read, Prompt):
            found.append(read)
        elif data.on_bad_line == "stop":
            raise ValueError(f"{uri} line {read.line}: {read.reason}")
        else:
            bad.append(read)
    if not found:
        raise ValueError(f"{uri} has no usable row, and the first is line {bad[0].line}: {bad[0].reason}")
    if bad and quarantine_uri is not None:
        files.publish(quarantine_uri, _quarantined(uri, bad), overwrite=True)
    return _prompt_set(uri, found, context_length=context_length, bad_lines=len(bad))


def stored_prompts(table: pa.Table, *, too_long: int, bad_lines: int) -> PromptSet:
    """The set that a run has stored, with the counts of what it set aside."""
    rows = table.select(list(Prompt.__dataclass_fields__)).to_pylist()
    return _counted(tuple(Prompt(**row) for row in rows), too_long=too_long, bad_lines=bad_lines)


def dataset_name(uri: str) -> str:
    """The base name of a prompt file, without its extension."""
    name = masked_text(uri).rstrip("/").rsplit("/", 1)[-1]
    for extension in sorted(EXTENSIONS, key=len, reverse=True):
        name = name.removesuffix(extension)
    return name


def prompt_id(prompt: Any, label: Any, metadata: Any) -> str:
    """What a prompt says, as 32 hexadecimal digits; neither its file nor its position counts, nor the order of keys."""
    content = files.canonical_json([prompt, label, metadata])
    return hashlib.sha256(content.encode()).hexdigest()[:32]


def _check_keys(uri: str, values: Sequence[dict[str, Any]], data: DataSection) -> None:
    """A column that no row has is a mistake in the parameters, not in the rows. Label and metadata may be absent."""
    seen = {key for value in values for key in value}
    for field in ("input_key", "label_key", "metadata_key"):
        key = getattr(data, field)
        optional = field != "input_key" and key == DataSection.model_fields[field].default
        if values and key not in seen and not optional:
            hint = nearest(key, sorted(seen))
            raise ValueError(f"{uri}: no row has data.{field} {key!r}{hint}; keys found: {sorted(seen)}")


def _read_row(row: RawRow, data: DataSection, tokenizer: Tokenizer, dataset: str) -> Prompt | BadLine:
    try:
        return _prompt(row, data, tokenizer, dataset)
    except Unusable as error:
        return BadLine(row.line, str(error), as_text(row.value))


def _prompt(row: RawRow, data: DataSection, tokenizer: Tokenizer, dataset: str) -> Prompt:
    prompt = _checked_prompt(row.value, data.input_key)
    label = row.value.get(data.label_key)
    metadata = _checked_metadata(row.value.get(data.metadata_key), data.metadata_key)
    try:
        texts = [to_json(value) for value in (prompt, label, metadata)]
    except (TypeError, ValueError) as error:
        raise Unusable(f"a value that JSON cannot hold: {error}") from None
    tokens = _tokens(prompt, tokenizer, template=data.apply_chat_template)
    return Prompt(prompt_id(prompt, label, metadata), dataset, row.row, texts[0], tokens, texts[1], texts[2])


def _checked_prompt(value: dict[str, Any], key: str) -> str | Messages:
    prompt = value.get(key)
    if prompt is None:
        raise Unusable(f"no {key!r}; keys found: {sorted(value)}")
    if isinstance(prompt, str) and prompt:
        return prompt
    if not isinstance(prompt, list) or not prompt:
        raise Unusable(f"{key!r} is {shown(prompt)}, expected a string or a list of messages, not empty")
    return [checked_message(message, key) for message in prompt]


def _checked_metadata(metadata: Any, key: str) -> dict[str, Any]:
    """An object, or the JSON text of one: Parquet cannot hold objects of differing shapes otherwise."""
    if isinstance(metadata, str):
        try:
            metadata = parse_json(metadata)
        except (ValueError, RecursionError) as error:
            raise Unusable(f"{key!r} is text that is not a JSON object: {error}") from None
    if metadata is None:
        return {}
    if not isinstance(metadata, dict):
        raise Unusable(f"{key!r} is {shown(metadata)}, expected an object")
    return metadata


def _tokens(prompt: str | Messages, tokenizer: Tokenizer, *, template: bool) -> list[int]:
    if not template and not isinstance(prompt, str):
        raise Unusable("the prompt is a list of messages: set data.apply_chat_template, or give a string")
    text = encodable(prompt)
    try:
        ids = tokenizer.render(text) if template else tokenizer.encode(text)
    except ValueError as error:
        raise Unusable(f"the tokenizer refuses it: {error}") from None
    if not ids:
        raise Unusable("the prompt has no tokens")
    return ids


def _prompt_set(uri: str, found: list[Prompt], *, context_length: int, bad_lines: int) -> PromptSet:
    fitting = tuple(prompt for prompt in found if len(prompt.prompt_token_ids) < context_length)
    if not fitting:
        shortest = min(len(prompt.prompt_token_ids) for prompt in found)
        raise ValueError(
            f"{uri}: all {len(found)} prompts are too long, the shortest has {shortest} tokens and the context "
            f"{context_length}: raise model.context_length above {shortest}"
        )
    return _counted(fitting, too_long=len(found) - len(fitting), bad_lines=bad_lines)


def _counted(prompts: tuple[Prompt, ...], *, too_long: int, bad_lines: int) -> PromptSet:
    ids = [prompt.prompt_id for prompt in prompts]
    digest = files.digest_of("\n".join(ids).encode())
    return PromptSet(prompts, digest, too_long, bad_lines, len(ids) - len(set(ids)))


def _quarantined(uri: str, bad: Sequence[BadLine]) -> bytes:
    lines = ({"file": uri, "line": line.line, "reason": line.reason, "text": line.text} for line in bad)
    return "".join(to_json(line) + "\n" for line in lines).encode()
