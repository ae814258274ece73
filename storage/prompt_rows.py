"""A row of a prompt set as a prompt with token ids, or why it is none.

A prompt is identified by what it says (prompt, label, metadata): moving, slicing or renaming a file keeps identities.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from milepost.storage import files
from milepost.storage.messages import Messages, Unusable, as_text, checked_messages, shown
from milepost.storage.parameters import DataSection
from milepost.storage.prompt_source import BadLine, RawRow
from milepost.storage.strict_json import parse_json
from milepost.storage.text import encodable, to_json

TOOLS = "tools"
"""The key of the metadata with the tools that a prompt may use."""
REWARDS = ("reward", "rm_type")
"""The keys of the metadata that name the reward of a prompt; the first that is a text counts."""

Tools = list[dict[str, Any]]


class Tokenizer(Protocol):
    """What prompts need of a tokenizer. The text it is given is valid Unicode."""

    def render(self, messages: Messages | str, tools: Tools | None = None) -> list[int]:
        """Token ids of the chat template up to where the answer begins; a string is one user message.

        ValueError when the template refuses the messages, or has no place for the tools.
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
class RowReader:
    """Reads the rows of one set by the keys of `data`. `reward` is that of the set, where it has its own."""

    data: DataSection
    tokenizer: Tokenizer
    dataset: str
    reward: str = ""

    def read(self, row: RawRow) -> Prompt | BadLine:
        try:
            return self._prompt(row)
        except Unusable as error:
            return BadLine(row.row, row.line, str(error), as_text(row.value))

    def _prompt(self, row: RawRow) -> Prompt:
        data, value = self.data, row.value
        tools = checked_tools(value.get(data.tools_key), data.tools_key)
        prompt = _with_system(_checked_prompt(value, data.input_key), data.system_prompt)
        label = value.get(data.label_key)
        metadata = self._metadata(value, tools)
        try:
            texts = [to_json(found) for found in (prompt, label, metadata)]
        except (TypeError, ValueError) as error:
            raise Unusable(f"a value that JSON cannot hold: {error}") from None
        tokens = self._tokens(prompt, tools)
        identity = prompt_id(prompt, label, metadata)
        return Prompt(identity, self.dataset, row.row, texts[0], tokens, texts[1], texts[2])

    def _metadata(self, value: dict[str, Any], tools: Tools) -> dict[str, Any]:
        """Those of the row, with its tools, and the reward of the set unless the row names its own."""
        metadata = _checked_metadata(value.get(self.data.metadata_key), self.data.metadata_key)
        if tools and TOOLS in metadata:
            raise Unusable(f"tools in {self.data.tools_key!r} and in {self.data.metadata_key!r}: give them once")
        own = reward_of(metadata)
        if own and ":" in own:  # files come from elsewhere: what they say is data, and never which code runs
            raise Unusable(f"the row names code, {own!r}, as its reward: name it in data.sets or reward.name instead")
        named = {REWARDS[0]: self.reward} if self.reward and not own else {}
        return metadata | named | ({TOOLS: tools} if tools else {})

    def _tokens(self, prompt: str | Messages, tools: Tools) -> list[int]:
        if not self.data.apply_chat_template and (tools or not isinstance(prompt, str)):
            what = "has tools" if tools else "is a list of messages"
            raise Unusable(f"the prompt {what}: set data.apply_chat_template, or give a string")
        text = encodable(prompt)
        try:
            if not self.data.apply_chat_template:
                ids = self.tokenizer.encode(text)
            elif tools:
                ids = self.tokenizer.render(text, encodable(tools))
            else:
                ids = self.tokenizer.render(text)
        except ValueError as error:
            raise Unusable(f"the tokenizer refuses it: {error}") from None
        if not ids:
            raise Unusable("the prompt has no tokens")
        return ids


def reward_of(metadata: Mapping[str, Any]) -> str | None:
    """The reward that a prompt names; a value that is no text is somebody else's and names none."""
    named = (metadata.get(key) for key in REWARDS)
    return next((name for name in named if isinstance(name, str) and name), None)


def prompt_id(prompt: Any, label: Any, metadata: Any) -> str:
    """What a prompt says, as 32 hexadecimal digits; neither its file nor its position counts, nor the order of keys."""
    content = files.canonical_json([prompt, label, metadata])
    return hashlib.sha256(content.encode()).hexdigest()[:32]


def _checked_prompt(value: dict[str, Any], key: str) -> str | Messages:
    prompt = value.get(key)
    if prompt is None:
        raise Unusable(f"no {key!r}; keys found: {sorted(value)}")
    if isinstance(prompt, str) and prompt:
        return prompt
    if not isinstance(prompt, list) or not prompt:
        raise Unusable(f"{key!r} is {shown(prompt)}, expected a string or a list of messages, not empty")
    return checked_messages(prompt, key)


def _with_system(prompt: str | Messages, system: str) -> str | Messages:
    if not system:
        return prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    own = any(message["role"] == "system" for message in messages)
    return messages if own else [{"role": "system", "content": system}, *messages]


def _checked_metadata(metadata: Any, key: str) -> dict[str, Any]:
    """An object, or the JSON text of one: Parquet cannot hold objects of differing shapes otherwise."""
    if isinstance(metadata, str):
        metadata = _parsed(metadata, key, "a JSON object")
    if metadata is None:
        return {}
    if not isinstance(metadata, dict):
        raise Unusable(f"{key!r} is {shown(metadata)}, expected an object")
    return metadata


def checked_tools(tools: Any, key: str) -> Tools:
    """A list of objects, or the JSON text of one; without the nulls that Parquet gives to what others have."""
    if isinstance(tools, str):
        tools = _parsed(tools, key, "a JSON list") if tools else None
    if tools is None:
        return []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Unusable(f"{key!r} is {shown(tools)}, expected a list of tool definitions")
    return [_without_nulls(tool) for tool in tools]


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _parsed(text: str, key: str, what: str) -> Any:
    try:
        return parse_json(text)
    except (ValueError, RecursionError) as error:
        raise Unusable(f"{key!r} is text that is not {what}: {error}") from None
