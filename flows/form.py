"""The run form of a deployment: the JSON schema that Prefect's page asks by, and that its server refuses values by."""

import re
from collections.abc import Collection, Mapping
from importlib.metadata import entry_points
from typing import Any

from prefect import Flow
from prefect.utilities.callables import parameter_schema

from milepost.engines import loss_params
from milepost.router import policies
from milepost.tasks import advantages, filters, rewards, rollouts
from milepost.tasks.reward_choice import BOXED

Schema = dict[str, Any]

SHOWN_LENGTH = 30
"""Characters of a default that is still shown."""

_REWARDS = (rewards.REWARDS, rewards.GROUP)
# What a name is chosen from: the built-in ones, and the entry points of a group.
_NAMES: dict[tuple[str, str], tuple[Collection[str], str]] = {
    ("RewardSection", "name"): _REWARDS,
    ("RewardPart", "name"): _REWARDS,
    ("EvalSet", "reward"): _REWARDS,
    ("DataSet", "reward"): _REWARDS,
    ("RolloutSection", "function"): (rollouts.ROLLOUTS, rollouts.GROUP),
    ("FilterSection", "group"): (filters.FILTERS, filters.GROUP),
    ("FilterSection", "sample"): (filters.SAMPLE_FILTERS, filters.SAMPLE),
    ("AlgorithmSection", "advantage"): (advantages.ADVANTAGES, advantages.GROUP),
    ("AlgorithmSection", "loss"): (loss_params.LOSSES, loss_params.GROUP),
    ("EnginesSection", "router_policy"): (policies.POLICIES, policies.GROUP),
}


def run_form(flow: Flow[..., Any], given: Mapping[str, Any]) -> Schema:
    """The form of a flow in a deployment that gives it the parameters `given`; it refuses what the flow does not have.

    A field that is emptied on the page is not sent, and its section has a default for it. Where the page shows another
    value the field is required, so that emptying it is refused.
    """
    schema: Schema = parameter_schema(flow).model_dump(exclude_unset=True)
    fields: dict[str, Schema] = schema["properties"]
    begun = {name: field["default"] for name, field in fields.items() if "default" in field} | dict(given)
    filled = {_kind(field): begun[name] for name, field in fields.items() if name in begun}
    sections = {
        kind: _section(kind, section, filled.get(kind) or {}) for kind, section in schema.get("definitions", {}).items()
    }
    shown = {name: _explained(_flat(_beginning(field, begun.get(name)))) for name, field in fields.items()}
    return schema | {"properties": shown, "definitions": sections, "additionalProperties": False}


def _beginning(field: Schema, value: Any) -> Schema:
    """With `value` as the default, without what is None in it: the page sends what it finds there."""
    if value is None:
        return field
    given = {name: item for name, item in value.items() if item is not None} if isinstance(value, dict) else value
    return field | {"default": given}


def _kind(field: Schema) -> str:
    """The definition that a field refers to, if any."""
    return str(field.get("$ref", "")).rpartition("/")[2]


def _section(kind: str, section: Schema, given: Mapping[str, Any]) -> Schema:
    """A section that the page shows with the values `given`."""
    fields: dict[str, Schema] = section["properties"]
    differing = [name for name, field in fields.items() if _differs(given.get(name), field.get("default"))]
    filled = {name: field | {"default": given[name]} if name in differing else field for name, field in fields.items()}
    shown = {name: _explained(_named(kind, name, _flat(field))) for name, field in filled.items()}
    return section | {"properties": shown, "required": [*section.get("required", []), *differing]}


def _differs(given: Any, default: Any) -> bool:
    """Whether leaving a field out changes what is given. An empty default does not: it is what the page shows then."""
    return not _is_empty(given) and not _is_empty(default) and given != default


def _is_empty(value: Any) -> bool:
    return value is None or value == "" or value == [] or value == {}


def _named(kind: str, name: str, field: Schema) -> Schema:
    """With what its names match, if it chooses by name."""
    if (kind, name) not in _NAMES:
        return field
    return field | {"pattern": name_pattern(*_NAMES[kind, name], optional=field.get("default") == "")}


def name_pattern(builtins: Collection[str], group: str, *, optional: bool) -> str:
    """What the names of an extension point match, and every `pkg.mod:fn`; it reads as a list of the names."""
    installed = sorted(point.name for point in entry_points(group=group))
    names = "|".join(re.escape(name) for name in dict.fromkeys((*builtins, *installed)))
    prefix = f"({BOXED})?" if group == rewards.GROUP else ""
    return f"{'^$|' if optional else ''}^{prefix}({names})$|:"


def _flat(field: Schema) -> Schema:
    """A field that is None unless it is given, as one of its other type that may be left out.

    The server then says which bound a value crosses, instead of that it fits none of two schemas. It takes null where
    there is no default, and the page would send a default of null. A section stays as it is: the page would fill it in.
    """
    choices = [choice for choice in field.get("anyOf", []) if choice != {"type": "null"}]
    if len(choices) != 1 or "type" not in choices[0] or field.get("default", "") is not None:
        return field
    return choices[0] | {name: value for name, value in field.items() if name not in ("anyOf", "default")}


def _explained(field: Schema) -> Schema:
    """With bounds and default in the help, behind its first paragraph."""
    if "description" not in field or not (said := hint(field)):
        return field
    first, *others = field["description"].split("\n\n")
    return field | {"description": "\n\n".join((f"{first} {said}", *others))}


def hint(field: Schema) -> str:
    """Bounds and default of a field, such as `More than 0; 1e-06 by default.`; empty where it has neither."""
    said = "; ".join(part for part in (_bounds(field), _default(field)) if part)
    return f"{said[0].upper()}{said[1:]}." if said else ""


def _bounds(field: Schema) -> str:
    above, least, below, most = (
        field.get(name) for name in ("exclusiveMinimum", "minimum", "exclusiveMaximum", "maximum")
    )
    if above is not None and field.get("type") == "integer":
        above, least = None, above + 1
    if least is not None and most is not None:
        return f"from {_number(least)} to {_number(most)}"
    said = (("more than {}", above), ("{} or more", least), ("less than {}", below), ("{} at most", most))
    return ", ".join(words.format(_number(bound)) for words, bound in said if bound is not None)


def _default(field: Schema) -> str:
    match field.get("default"):
        case bool(value):
            return f"{'on' if value else 'off'} by default"
        case int(value) | float(value):
            return f"{_number(value)} by default"
        case str(value) if 0 < len(value) <= SHOWN_LENGTH:
            return f"`{value}` by default"
    return ""


def _number(value: float) -> str:
    """As people write it: 1, 0.9, 1e-06."""
    return str(value).removesuffix(".0")
