"""Writes parameters.md from the sections of `Parameters`: `python docs/make_parameters.py`."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from milepost.storage.parameters import Parameters

PAGE = Path(__file__).with_name("parameters.md")
HEAD = """# Parameters

Made by `python docs/make_parameters.py` from what the code says; the forms of the deployments show the same.
"""
BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def page() -> str:
    schema = Parameters.model_json_schema()
    names = {name: field["$ref"].rpartition("/")[2] for name, field in schema["properties"].items()}
    within = [name for name in schema["$defs"] if name not in names.values()]
    sections = [_section(f"`{name}`", schema["$defs"][kind]) for name, kind in names.items()]
    parts = [_section(f"Each {_spaced(name)}", schema["$defs"][name]) for name in sorted(within)]
    return "\n".join([HEAD, *sections, *parts])


def _section(title: str, schema: dict[str, Any]) -> str:
    rows = "\n".join(_rows(schema))
    return f"## {title}\n\n{schema['description']}\n\n| field | values | default | |\n|---|---|---|---|\n{rows}\n"


def _rows(schema: dict[str, Any]) -> Iterator[str]:
    for name, field in schema["properties"].items():
        default = f"`{json.dumps(field['default'])}`" if "default" in field else "must be given"
        yield f"| `{name}` | {_values(field)} | {default} | {' '.join(field['description'].split())} |"


def _values(field: dict[str, Any]) -> str:
    if "anyOf" in field:
        return " or ".join("empty" if kind.get("type") == "null" else _values(kind) for kind in field["anyOf"])
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if "$ref" in field:
        return _spaced(field["$ref"].rpartition("/")[2])
    if field["type"] == "array":
        return f"list of {_values(field['items'])}"
    if field["type"] == "object":
        return f"{_values(field['additionalProperties'])} by name"
    bounds = [f"{sign} {field[name]:g}" for name, sign in BOUNDS.items() if name in field]
    return " ".join([field["type"], *bounds])


def _spaced(name: str) -> str:
    return "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in name).strip()


if __name__ == "__main__":
    PAGE.write_text(page())
