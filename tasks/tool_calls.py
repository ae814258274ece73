"""Calls of tools in what a model said, in the formats that chat templates teach.

A call that cannot be made has a problem in place of a name and arguments: the model is told of it.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from milepost.storage.registry import nearest

AUTO = "auto"
THOUGHT, THOUGHT_ENDS = "<think>", "</think>"
SHOWN = 200


@dataclass(frozen=True)
class ToolCall:
    """One call. `problem` says why it cannot be made."""

    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    problem: str = ""


Parser = Callable[[str], list[ToolCall]]


def calls_in(text: str, format: str) -> list[ToolCall]:
    """The calls in an answer, in order; what it thinks before it answers calls nothing."""
    _, ended, answer = text.rpartition(THOUGHT_ENDS)
    if not ended and text.lstrip().startswith(THOUGHT):
        return []
    return FORMATS[format](answer)


def hermes(text: str) -> list[ToolCall]:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes, Qwen and SmolLM2 write.

    A list of calls in one pair of tags counts as several. The last pair need not be closed: engines cut stop strings.
    """
    bodies = [part.partition("</tool_call>")[0] for part in text.split("<tool_call>")[1:]]
    return [call for body in bodies for call in _listed(body, "arguments")]


def llama3(text: str) -> list[ToolCall]:
    """`{"name": ..., "parameters": {...}}` as the whole answer or behind `<|python_tag|>`, several apart by `;`.

    An answer in JSON that has no name and parameters is an answer.
    """
    before, tag, tagged = text.partition("<|python_tag|>")
    body = (tagged if tag else before).strip()
    if not tag and not (body.startswith("{") and '"name"' in body and re.search('"(parameters|arguments)"', body)):
        return []
    return [_call(value, "parameters") for value in _sequence(body)]


def mistral(text: str) -> list[ToolCall]:
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, or `[TOOL_CALLS]name[ARGS]{...}` for each call."""
    calls: list[ToolCall] = []
    for part in text.split("[TOOL_CALLS]")[1:]:
        named = re.match(r"\s*([^\s\[{]+)\s*(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?\s*(?=\{)", part)
        if named is None:
            calls += _listed(part, "arguments")
            continue
        value = _first(part[named.end() :])
        calls.append(_call({"name": named[1], "arguments": value} if isinstance(value, dict) else value, "arguments"))
    return calls


FORMATS: dict[str, Parser] = {"hermes": hermes, "llama3": llama3, "mistral": mistral}

# What only the template of a format has. Those that write XML instead of JSON between the tags are none of ours.
_SIGNS: dict[str, Callable[[str], bool]] = {
    "hermes": lambda template: "<tool_call>" in template and "<function=" not in template and "<arg_" not in template,
    "llama3": lambda template: "ipython" in template and '"parameters": ' in template,
    "mistral": lambda template: "[TOOL_CALLS]" in template,
}


def tool_format(chosen: str, template: str) -> str:
    """The format called `chosen`; for `auto`, the one that a chat template teaches."""
    known = sorted(FORMATS)
    if chosen != AUTO and chosen not in FORMATS:
        raise LookupError(f"unknown rollout.tool_format {chosen!r}{nearest(chosen, known)} known: {known}")
    found = [name for name, has in _SIGNS.items() if has(template)] if chosen == AUTO else [chosen]
    if len(found) != 1:
        raise LookupError(
            f"the chat template calls tools in no format that is known: set rollout.tool_format to one of {known}; "
            "with hermes, tools are written into the system message where the template has no place for them"
        )
    return found[0]


class _Broken(str):
    """Text in place of a value: why there is none."""


def _first(text: str) -> Any:
    """The JSON value that text begins with; what follows it says nothing."""
    try:
        return json.JSONDecoder().raw_decode(text.lstrip())[0]
    except (ValueError, RecursionError) as error:
        return _Broken(f"not JSON ({error}): {text.strip()[:SHOWN]}")


def _sequence(text: str) -> Iterator[Any]:
    """JSON values behind each other, apart by `;` or white space, up to the first that is none."""
    while text:
        try:
            value, end = json.JSONDecoder().raw_decode(text)
        except (ValueError, RecursionError):
            yield _first(text)
            return
        yield value
        text = text[end:].lstrip(" \n\t;")


def _listed(text: str, key: str) -> list[ToolCall]:
    value = _first(text)
    return [_call(item, key) for item in value] if isinstance(value, list) and value else [_call(value, key)]


def _call(value: Any, key: str) -> ToolCall:
    """A value as a call. Arguments may be JSON text of an object, and are none when they are left out."""
    if isinstance(value, _Broken):
        return ToolCall(problem=f"the call is {value}")
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return ToolCall(problem=f"the call is {_shown(value)}, expected an object with 'name' and {key!r}")
    given = value.get(key, value.get("arguments", value.get("parameters", {})))
    arguments = _first(given) if isinstance(given, str) else given
    if not isinstance(arguments, dict):
        return ToolCall(problem=f"the {key} of {value['name']!r} are {_shown(given)}, expected an object")
    return ToolCall(value["name"], arguments)


def _shown(value: Any) -> str:
    return json.dumps(value)[:SHOWN]
