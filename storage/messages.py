"""Chat messages as rows of a file have them: what one must be, and how a value that is none is shown."""

from typing import Any

from milepost.storage.text import to_json

Messages = list[dict[str, Any]]


class Unusable(ValueError):
    """Why a row cannot be used."""


def checked_messages(found: Any, key: str) -> Messages:
    """Messages with role and content, or tool calls in its place; Unusable says what they are instead."""
    if not isinstance(found, list) or not found:
        raise Unusable(f"{key!r} is {shown(found)}, expected a list of messages, not empty")
    return [checked_message(message, key) for message in found]


def checked_message(message: Any, key: str) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str) or not _says_something(message):
        raise Unusable(f"{key!r} holds {shown(message)}, expected a message with 'role' and 'content'")
    # Parquet gives every message the fields of all; a null there means that the message has none.
    return {name: value for name, value in message.items() if value is not None or name == "content"}


def _says_something(message: dict[str, Any]) -> bool:
    """Text or parts of it; a message that calls tools may do without."""
    if message.get("content") is None:
        return bool(message.get("tool_calls")) or "content" in message
    return isinstance(message["content"], str | list)


def as_text(value: Any) -> str:
    """As JSON where it is, else as Python shows it."""
    try:
        return to_json(value)
    except (TypeError, ValueError):
        return repr(value)


def shown(value: Any) -> str:
    """The beginning of a value."""
    text = as_text(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
