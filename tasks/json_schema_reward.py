"""The reward for structured output: JSON that a schema allows."""

import re
from typing import Any

from jsonschema.exceptions import SchemaError, ValidationError, best_match
from jsonschema.validators import validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable

from milepost.storage.strict_json import parse_json
from milepost.tasks.extraction import after_thinking
from milepost.tasks.verdict import Sample, Verdict, ungradable

MAX_CHARACTERS = 2_000_000
MAX_REASON = 200

_FENCE = re.compile(r"^[ \t]*```.*$", re.MULTILINE)


def json_schema(sample: Sample, *, schema: str = "") -> Verdict:
    """1.0 when the response is JSON that the schema allows; otherwise 0.0. That it is JSON at all is the part `parses`.

    The schema is the option, as JSON, else the label: an object, true or false, or a text of JSON. The response counts
    after its thinking, as a whole or, where it has any, as its last fenced block. NaN and keys given twice are no
    JSON; `format` is a note as in the standard, and a `$ref` to another document cannot be followed.
    """
    problem = json_schema_label_problem(sample.label, {"schema": schema})
    if problem:
        return ungradable(sample.label, problem)
    text = _extracted(after_thinking(sample.response))
    if len(text) > MAX_CHARACTERS:
        return Verdict(0.0, {"parses": 0.0}, reason=f"too long: over {MAX_CHARACTERS} characters")
    try:
        value = parse_json(text)
    except (ValueError, RecursionError) as error:
        return Verdict(0.0, {"parses": 0.0}, reason=f"not JSON: {error}"[:MAX_REASON], extracted=text)
    try:
        wrong = best_match(_validator(_schema(sample.label, schema)).iter_errors(value))
    except Unresolvable as error:
        return Verdict(None, {"parses": 1.0}, reason=f"the schema refers elsewhere: {error}"[:MAX_REASON])
    except RecursionError:
        return Verdict(0.0, {"parses": 1.0}, reason="nested too deep", extracted=text)
    return Verdict(float(wrong is None), {"parses": 1.0}, reason=_told(wrong), extracted=text)


def json_schema_label_problem(label: Any, options: Any = None) -> str:
    """Why a label, or the option in its place, is no schema; empty when it is one."""
    try:
        schema = _schema(label, (options or {}).get("schema", ""))
    except (ValueError, RecursionError) as error:
        return f"it is not JSON ({error}), give a JSON schema"
    if not isinstance(schema, dict | bool):
        return "give a JSON schema, an object, as label or as the option 'schema'"
    try:
        validator_for(schema).check_schema(schema)
    except (SchemaError, RecursionError) as error:
        return f"give a valid JSON schema ({getattr(error, 'message', 'nested too deep')[:MAX_REASON]})"
    return ""


def _schema(label: Any, schema: str) -> Any:
    given = schema or label
    return parse_json(given) if isinstance(given, str) else given


def _validator(schema: Any) -> Any:
    # An empty registry: a schema never makes a grader read files or the network.
    return validator_for(schema)(schema, registry=Registry())


def _extracted(text: str) -> str:
    """The last fenced block that is closed, else all of it."""
    fences = [found.span() for found in _FENCE.finditer(text)]
    if len(fences) < 2:
        return text.strip()
    opening, closing = fences[: len(fences) // 2 * 2][-2:]
    return text[opening[1] : closing[0]].strip()


def _told(wrong: ValidationError | None) -> str:
    return "" if wrong is None else f"{wrong.json_path}: {wrong.message}"[:MAX_REASON]
