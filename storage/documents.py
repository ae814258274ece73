"""Samples as others read them: the prompt's messages with what followed, and every other column by its name.

A JSON document has a column's value where the table has JSON text. What is not known is null.
"""

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from milepost.storage.conversation import said_after
from milepost.storage.schema import ROLLOUTS
from milepost.storage.text import escape, from_json, to_json, unescape

TOKEN_COLUMNS = [
    *("prompt_token_ids", "response_token_ids", "loss_mask", "rollout_logprobs"),
    *("advantages", "old_logprobs", "ref_logprobs"),
]
_JSON = ("label", "sampling", "metadata", "verdict")
_SAID = ("prompt", "response", "response_escaped")  # which the messages hold
_MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))


def documents(table: pa.Table, *, tokens: bool = True) -> Iterator[dict[str, Any]]:
    """A JSON document for each row of a rollouts table. `prompt` is the text of a prompt that is not messages."""
    names = [name for name in ROLLOUTS.names if tokens or name not in TOKEN_COLUMNS]
    for row in table.select(names).to_pylist(maps_as_pydicts="strict"):
        prompt = from_json(row["prompt"])
        said = said_after(from_json(row["metadata"]), unescape(row["response"], row["response_escaped"]))
        found = {"messages": [*_messages(prompt), *said], "prompt": prompt if isinstance(prompt, str) else None}
        for name in names:
            if name not in _SAID:
                value = row[name]
                found[name] = from_json(value) if name in _JSON and value is not None else value
        yield found


def with_messages(table: pa.Table, *, tokens: bool = True) -> pa.Table:
    """A rollouts table with a column `messages` in front; content that is not text is JSON there."""
    messages = [
        [
            {"role": item["role"], "content": escape(_as_text(item.get("content")))[0]}
            for item in [*_messages(from_json(row["prompt"])), *said_after(from_json(row["metadata"]), row["response"])]
        ]
        for row in table.select([*_SAID, "metadata"]).to_pylist()
    ]
    left = table if tokens else table.drop_columns(TOKEN_COLUMNS)
    return left.add_column(0, "messages", pa.array(messages, _MESSAGES)).replace_schema_metadata(None)


def _messages(prompt: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def _as_text(content: Any) -> str:
    return content if isinstance(content, str) else to_json(content)
