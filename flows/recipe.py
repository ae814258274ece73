"""From a recipe and `--set` overrides to checked parameters; errors name the key and the nearest known one."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.resources import files as package_files
from pathlib import Path
from typing import Any, get_origin

import yaml
from pydantic import ValidationError

from milepost.storage.parameters import Parameters
from milepost.storage.redaction import masked, masked_text
from milepost.storage.registry import nearest
from milepost.storage.section import Section

DEFAULT_ROOT = "runs"
DEFAULT_STEPS = 10

_RUN_KEYS = ("run", "root", "steps")


def recipe_path(name: str) -> Path:
    """The file called `name`, or the shipped recipe of that name; FileNotFoundError lists the shipped ones."""
    path = Path(name)
    if path.is_file():
        return path
    folder = Path(str(package_files("milepost.deployments"))) / "recipes"
    shipped = folder / f"{name.removesuffix('.yaml')}.yaml"
    if shipped.is_file():
        return shipped
    known = sorted(found.stem for found in folder.glob("*.yaml"))
    raise FileNotFoundError(f"recipe {name!r} does not exist, give a YAML file or one of {known}")


def read_recipe(name: str) -> dict[str, Any]:
    """The sections of a recipe, as written."""
    path = recipe_path(name)
    try:
        content = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold sections such as 'model:' and 'data:', it holds {type(content).__name__}")
    return content


def parse_override(text: str) -> tuple[str, str, Any]:
    """`section.field=value` as its three parts; the value is JSON where it parses as such, else text.

    A field that holds values by name takes one of them as `section.field.name=value`.
    """
    key, equals, value = text.partition("=")
    section, dot, field = key.strip().partition(".")
    if not equals or not dot or not field:
        raise ValueError(f"--set {masked_text(text)!r} must look like section.field=value, such as optimizer.lr=1e-6")
    return section, field, json_or_text(value.strip())


def json_or_text(text: str) -> Any:
    """What a person typed: JSON where it parses as such, else the text itself."""
    if text == "":
        return ""
    try:
        return json.loads(text)
    except ValueError:
        return text


def with_overrides(content: Mapping[str, Any], overrides: list[str]) -> dict[str, Any]:
    """The recipe with each override in its section; unknown keys are refused here, before anything else is."""
    merged = {name: dict(value) if isinstance(value, dict) else value for name, value in content.items()}
    for override in overrides:
        section, field, value = parse_override(override)
        name, _, key = field.partition(".")
        if key and _is_mapping(section, name):
            field, value = name, {**(merged.get(section, {}).get(name) or {}), key: value}
        _require_known(section, field)
        merged.setdefault(section, {})[field] = value
    return merged


def require_references(overrides: Sequence[str]) -> None:
    """ValueError for a secret among overrides that Prefect stores as they are."""
    if found := parameters_of(with_overrides({}, list(overrides))).literal_secrets():
        raise ValueError(
            f"--set {found[0]} is a secret, and Prefect would store it: give env:NAME, with the secret in the "
            "environment variable NAME"
        )


def _is_mapping(section: str, field: str) -> bool:
    """Whether a field holds values by name, as `engines.sglang` does."""
    known = Parameters.model_fields.get(section)
    kind = known.annotation if known else None
    found = kind.model_fields.get(field) if isinstance(kind, type) and issubclass(kind, Section) else None
    return found is not None and get_origin(found.annotation) is dict


def _require_known(section: str, field: str) -> None:
    sections = Parameters.model_fields
    if section not in sections:
        raise LookupError(f"unknown section {section!r}{nearest(section, list(sections))}; known: {sorted(sections)}")
    kind = sections[section].annotation
    assert isinstance(kind, type) and issubclass(kind, Section)
    if field not in kind.model_fields:
        known = list(kind.model_fields)
        raise LookupError(f"unknown key '{section}.{field}'{nearest(field, known)}; known: {sorted(known)}")


def parameters_of(content: Mapping[str, Any]) -> Parameters:
    """Checked parameters; ValueError or LookupError in one sentence for the first thing that is wrong."""
    sections = {name: value for name, value in content.items() if name not in _RUN_KEYS}
    for section, fields in sections.items():
        if not isinstance(fields, dict):
            _require_section(section)
            raise ValueError(f"section {section!r} must hold fields, it is {fields!r}")
        for field in fields:
            _require_known(section, str(field))
        if not fields:
            _require_section(section)
    try:
        return Parameters.model_validate(sections)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        if first["type"] == "value_error":  # of fields that do not go together: it names them
            raise ValueError(f"{where}: {first['ctx']['error']}") from None
        raise ValueError(f"{where} is {masked(first['input'], where)!r}: {first['msg'].lower()}") from None


def _require_section(section: str) -> None:
    if section not in Parameters.model_fields:
        known = list(Parameters.model_fields)
        raise LookupError(f"unknown section {section!r}{nearest(section, known)}; known: {sorted(known)}")


def load_recipe(name: str | None, overrides: list[str]) -> tuple[Parameters, dict[str, Any]]:
    """The parameters of a recipe (none: the defaults) with overrides, and its run, root and steps if it has any."""
    content = read_recipe(name) if name else {}
    run_values = {key: content[key] for key in _RUN_KEYS if key in content}
    return parameters_of(with_overrides(content, overrides)), run_values


@dataclass(frozen=True)
class Request:
    """A run that somebody asked for."""

    run: str
    root: str
    steps: int
    parameters: Parameters


def request(
    config: str | None, overrides: list[str], *, run: str | None, root: str | None, steps: int | None
) -> Request:
    """What a command line asks for: its own words first, then the recipe's, then the defaults."""
    parameters, values = load_recipe(config, overrides)
    stem = recipe_path(config).stem if config else "run"  # a shipped one may be named qwen3-0.6b
    return Request(
        run=run if run is not None else values.get("run") or f"{stem}-{datetime.now():%Y%m%d-%H%M%S}",
        root=absolute_root(root or values.get("root") or DEFAULT_ROOT),
        steps=steps if steps is not None else int(values.get("steps", DEFAULT_STEPS)),
        parameters=parameters,
    )


def absolute_root(root: str) -> str:
    """A local root as an absolute path, so that every process means the same folder; other URIs as they are."""
    return root if "://" in root else str(Path(root).absolute())
