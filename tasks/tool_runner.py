"""What runs in a tool process: the function that a model has called, and its result as text."""

import asyncio
import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any

from milepost.storage.registry import load_dotted

GROUP = "rollout.tools"


def import_tools(functions: Sequence[str]) -> None:
    """Import what may be called, which is on nobody's clock."""
    for function in functions:
        load_dotted(function, group=GROUP)


def run_tool(function: str, arguments: Mapping[str, Any]) -> str:
    """What `function(**arguments)` returns, awaited if need be: text as it is, anything else as JSON."""
    value = load_dotted(function, group=GROUP)(**arguments)
    if inspect.isawaitable(value):
        value = asyncio.run(_awaited(value))
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


async def _awaited(value: Any) -> Any:
    return await value
