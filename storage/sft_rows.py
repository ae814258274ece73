"""Rows to learn from: a dialogue, whose assistant turns are learnt, or a prompt with its response."""

from dataclasses import dataclass
from typing import Any

from pydantic import NonNegativeInt, PositiveInt

from milepost.storage.messages import Messages, Unusable, checked_messages, shown
from milepost.storage.prompt_rows import Tools, checked_tools
from milepost.storage.prompt_source import BadLine, RawRow, parse_path, read_rows
from milepost.storage.section import Section

ASSISTANT = "assistant"


class SftDataSection(Section):
    """Which rows are learnt, and how many at a time."""

    path: str = ""
    """JSONL or Parquet rows of `messages`, or of `prompt` and `response`; `path@[a:b]` takes a slice of them.

    Messages may have `tools` beside them, definitions that the chat template shows to the model.
    """
    batch_size: PositiveInt = 32
    """Rows an optimizer step."""
    apply_chat_template: bool = True
    """Render a `prompt` through the tokenizer's chat template, as one user message; `messages` always are."""
    seed: NonNegativeInt = 0
    """Seed of the order of rows and of the trainer."""


@dataclass(frozen=True)
class Dialogue:
    """Messages, some of them the assistant's and the first of them not, and the tools that it may call in them.

    `row` is its position in the file, from 0, and `line` where it is there, from 1.
    """

    row: int
    line: int
    messages: Messages
    tools: Tools


@dataclass(frozen=True)
class Solved:
    """A prompt and the response to it; `row` and `line` as in Dialogue."""

    row: int
    line: int
    prompt: str
    response: str


def read_sft_rows(path: str) -> list[Dialogue | Solved]:
    """Every row of a file; ValueError names the file and the line of the first that cannot be used, and why."""
    uri, _ = parse_path(path)
    found = []
    for row in read_rows(path):
        if isinstance(row, BadLine):
            raise bad_row(uri, row.line, row.reason)
        try:
            found.append(_read(row))
        except Unusable as error:
            raise bad_row(uri, row.line, str(error)) from None
    return found


def bad_row(uri: str, line: int, reason: str) -> ValueError:
    return ValueError(f"{uri} line {line}: {reason}")


def _read(row: RawRow) -> Dialogue | Solved:
    # Parquet gives every row the columns of all; a null there means that the row has none.
    value = {key: found for key, found in row.value.items() if found is not None}
    if "messages" in value:
        tools = checked_tools(value.get("tools"), "tools")
        return Dialogue(row.row, row.line, _checked_dialogue(value["messages"]), tools)
    if not {"prompt", "response"} <= value.keys():
        raise Unusable(f"no 'messages', and not both 'prompt' and 'response'; keys found: {sorted(value)}")
    return Solved(row.row, row.line, _checked_text(value, "prompt"), _checked_text(value, "response"))


def _checked_text(value: dict[str, Any], key: str) -> str:
    text = value[key]
    if not isinstance(text, str) or not text:
        raise Unusable(f"{key!r} is {shown(text)}, expected text, not empty")
    return text


def _checked_dialogue(found: Any) -> Messages:
    messages = checked_messages(found, "messages")
    roles = [message["role"] for message in messages]
    if ASSISTANT not in roles:
        raise Unusable(f"'messages' has no turn of the assistant to learn, its roles are {roles}")
    if roles[0] == ASSISTANT:
        raise Unusable("'messages' begins with the assistant: put what it answers to before it")
    for at, message in enumerate(messages):
        if message["role"] == ASSISTANT and not any(said for name, said in message.items() if name != "role"):
            raise Unusable(f"message {at} is the assistant's and says nothing: give it content, or leave the row out")
    return messages
