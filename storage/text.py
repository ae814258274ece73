"""Lossless text in Arrow strings: what is not valid Unicode is escaped and flagged, never dropped."""

import json
from typing import Any


def is_unicode(text: str) -> bool:
    """Whether `text` can be encoded as UTF-8: it holds no lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def encodable(value: Any) -> Any:
    """`value` with U+FFFD for the lone surrogates in its strings: no tokenizer has tokens for them."""
    if isinstance(value, str):
        return value if is_unicode(value) else value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [encodable(item) for item in value]
    if isinstance(value, dict):
        return {encodable(key): encodable(item) for key, item in value.items()}
    return value


def escape(text: str) -> tuple[str, bool]:
    """The text as an Arrow string can hold it, and whether it had to be escaped (JSON string escapes)."""
    if is_unicode(text):
        return text, False
    return json.dumps(text)[1:-1], True


def unescape(text: str, escaped: bool) -> str:
    if not escaped:
        return text
    original: str = json.loads(f'"{text}"')
    return original


def to_json(value: Any) -> str:
    """JSON for a text column: readable where it is valid Unicode, ASCII escapes where it is not; NaN is refused."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if is_unicode(text) else json.dumps(value, allow_nan=False)


def from_json(value: str) -> Any:
    """The value behind a JSON text column."""
    return json.loads(value)
