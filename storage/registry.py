"""One resolver for every extension point: a built-in name, an installed entry point, or `pkg.mod:fn`."""

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from importlib.metadata import entry_points
from typing import Any

SHOWN = 5


def nearest(name: str, known: list[str]) -> str:
    """`, did you mean 'x'?` for the closest known name, or nothing."""
    found = get_close_matches(name, known, n=1, cutoff=0.5)
    return f", did you mean {found[0]!r}?" if found else ""


def some_of(known: Sequence[str]) -> str:
    """A few of the known names, and how many more there are."""
    shown = ", ".join(known[:SHOWN])
    return shown if len(known) <= SHOWN else f"{shown} and {len(known) - SHOWN} more"


def resolve(name: str, builtins: Mapping[str, Any], *, group: str) -> Any:
    """The object called `name` in the extension point `group` (such as `milepost.rewards`).

    Raises LookupError when there is none, with the nearest name.
    """
    if name in builtins:
        return builtins[name]
    if ":" in name:
        return load_dotted(name, group=group)
    installed = {point.name: point for point in entry_points(group=group)}
    if name in installed:
        return installed[name].load()
    known = sorted({*builtins, *installed})
    raise LookupError(f"unknown {group} {name!r}{nearest(name, known)} known: {known}, or give 'pkg.mod:fn'")


def load_dotted(name: str, *, group: str) -> Any:
    """The object at `pkg.mod:fn`; raises LookupError that says which part is missing."""
    module_name, _, attribute = name.partition(":")
    if module_name == "__main__":  # another module in every process that looks the name up
        raise LookupError(f"{group} {name!r}: cannot import '__main__' elsewhere, put {attribute!r} in a module file")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise LookupError(f"{group} {name!r}: cannot import {module_name!r} ({error})") from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise LookupError(f"{group} {name!r}: module {module_name!r} has no {attribute!r}") from None


def check_arity(function: Callable[..., Any], count: int, *, name: str, group: str) -> None:
    """Raise ValueError unless `function` can be called with `count` positional arguments."""
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError as error:
        found = inspect.signature(function)
        raise ValueError(f"{group} {name!r} must take {count} arguments, its signature is {found} ({error})") from None
