"""Names and values as MLflow takes them: what it would refuse is renamed, what it would cut in silence is cut here."""

import json
import posixpath
import re
from collections.abc import Iterator, Mapping
from typing import Any

from milepost.storage import files

PREFIX = "milepost."

# MLflow takes 250 characters of a name; this leaves room for a prefix. It keeps longer values only in part.
NAME_CHARACTERS = 200
PARAM_CHARACTERS = 500
TAG_CHARACTERS = 5000
DIGEST_CHARACTERS = 36

_ILLEGAL = re.compile(r"[^/\w.\- :]")
_ILLEGAL_IN_MODEL = re.compile(r"[/:.%\"'\s]")


def legal_name(name: str) -> str:
    """`name` itself where MLflow takes it, else a legal name that no other name is mapped to."""
    parts = [part for part in _ILLEGAL.sub("_", name).split("/") if part not in ("", ".", "..")]
    legal = posixpath.join("", *parts)
    if name and legal == name and len(name) <= NAME_CHARACTERS:
        return name
    return f"{legal[: NAME_CHARACTERS - 9] or 'name'}-{files.digest_of(name.encode(errors='surrogatepass'))[:8]}"


def clean_text(text: str, characters: int) -> str:
    """`text` cut to `characters`, with what is not valid Unicode as backslash escapes."""
    return text[:characters].encode(errors="backslashreplace").decode()


def flatten(sections: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """`section.field` and its value as text, cut to what MLflow keeps."""
    for key, value in sections.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value)
            yield f"{prefix}{key}", clean_text(text, PARAM_CHARACTERS)


def aliases(names: Mapping[str, Any]) -> dict[str, str]:
    """Tags that give the real name of every metric or parameter that had to be renamed."""
    legal = {name: legal_name(name) for name in names}
    return {f"{PREFIX}alias.{new}": clean_text(name, TAG_CHARACTERS) for name, new in legal.items() if new != name}


def own_tags(values: Mapping[str, str]) -> dict[str, str]:
    """Tags of Milepost's own, apart from those of others by their prefix."""
    return {f"{PREFIX}{legal_name(name)}": clean_text(value, TAG_CHARACTERS) for name, value in values.items()}


def model_name(name: str) -> str:
    return _ILLEGAL_IN_MODEL.sub("_", name)
