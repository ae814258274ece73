"""The tools of a run: functions that a model may call between two answers, each in a process with a deadline.

Whatever a call comes to, the model gets an answer: what could not be done is told to it as text.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from milepost.engines.grader_process import Answer, Call
from milepost.engines.tool_schema import tool_schema
from milepost.engines.tool_turns import ToolTurns, tool_message
from milepost.storage.parameters import RolloutSection
from milepost.storage.prompt_rows import TOOLS
from milepost.storage.registry import load_dotted, nearest
from milepost.storage.text import encodable
from milepost.tasks.grading import Graders
from milepost.tasks.tool_calls import ToolCall, calls_in
from milepost.tasks.tool_runner import GROUP, import_tools, run_tool

RUN = f"{run_tool.__module__}:{run_tool.__name__}"
IMPORT = f"{import_tools.__module__}:{import_tools.__name__}"


@dataclass(frozen=True)
class ToolRules:
    """What decides a conversation, apart from the model. `functions` are `pkg.mod:fn`."""

    functions: tuple[str, ...]
    format: str
    max_turns: int
    timeout_seconds: float
    network: bool


@dataclass(frozen=True)
class Tool:
    """A function as `pkg.mod:fn`, and what a model is told of it."""

    function: str
    definition: dict[str, Any]

    @property
    def name(self) -> str:
        return name_of(self.definition)


@dataclass(frozen=True)
class ToolResult:
    """What a call came to, as the model is told."""

    name: str
    text: str
    failed: bool = False


def tool_rules(rollout: RolloutSection) -> ToolRules | None:
    """Those of a rollout section; None when it has no tools."""
    if not rollout.tools:
        return None
    return ToolRules(
        tuple(rollout.tools),
        rollout.tool_format,
        rollout.max_turns,
        rollout.tool_timeout_seconds,
        rollout.tool_network,
    )


def check_tools(rollout: RolloutSection) -> None:
    """ValueError or LookupError unless rollout function and tools go together and each tool can be called."""
    if rollout.function == "multi_turn" and not rollout.tools:
        raise ValueError("rollout.function is 'multi_turn' and rollout.tools is empty: name functions as pkg.mod:fn")
    if rollout.function == "single_turn" and rollout.tools:
        raise ValueError("rollout.tools is set and rollout.function 'single_turn' calls none: set it to multi_turn")
    load_tools(rollout.tools)


def load_tools(functions: Sequence[str]) -> dict[str, Tool]:
    """The tools by the names that a model calls them by; ValueError or LookupError for one that cannot be called."""
    found: dict[str, Tool] = {}
    for function in functions:
        called = load_dotted(function, group=GROUP)
        if not callable(called):
            raise ValueError(f"tool {function!r} is {called!r}, it must be a function")
        tool = Tool(function, tool_schema(called, function))
        if tool.name in found:
            raise ValueError(f"tools {found[tool.name].function!r} and {function!r} have one name: rename one")
        found[tool.name] = tool
    return found


def name_of(definition: Mapping[str, Any]) -> str:
    """The name of a tool in its definition, which has OpenAI's shape or is the function in it."""
    return str(definition.get("function", definition).get("name", ""))


@dataclass(frozen=True)
class Toolbox:
    """The tools for the conversations of one shard. `idle` has the processes that make no call at the moment."""

    rules: ToolRules
    format: str
    tools: Mapping[str, Tool]
    turns: ToolTurns
    idle: asyncio.Queue[Graders]

    def definitions(self, metadata: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The tools of a prompt: its own, or all."""
        own: list[dict[str, Any]] = metadata.get(TOOLS) or [tool.definition for tool in self.tools.values()]
        return own

    def calls(self, text: str) -> list[ToolCall]:
        """The calls in an answer of the model."""
        return calls_in(text, self.format)

    async def results(self, calls: Sequence[ToolCall], shown: Sequence[str]) -> list[ToolResult]:
        """What each call came to, in order; they are made side by side. Tools that are not `shown` are not there."""
        return list(await asyncio.gather(*(self._result(call, shown) for call in calls)))

    def between(self, results: Sequence[ToolResult], *, after: int) -> list[int]:
        """The tokens that tell the model of results, up to where it answers; `after` is the last one it said."""
        messages = [tool_message(result.name, encodable(result.text), at) for at, result in enumerate(results)]
        return self.turns.between(messages, after=after)

    async def _result(self, call: ToolCall, shown: Sequence[str]) -> ToolResult:
        if call.problem:
            return _failure("", call.problem)
        tool = self.tools.get(call.name) if call.name in shown else None
        if tool is None:
            return _failure(
                call.name, f"there is no tool {call.name!r}{nearest(call.name, [*shown])} tools: {[*shown]}"
            )
        processes = await self.idle.get()
        try:
            answer = await self._run(processes, tool, call)
        finally:
            self.idle.put_nowait(processes)
        return self._told(tool, answer)

    async def _run(self, processes: Graders, tool: Tool, call: ToolCall) -> Answer:
        rules = self.rules
        (answer,) = await processes.map(
            RUN,
            [(tool.function, call.arguments)],
            timeout_seconds=rules.timeout_seconds,
            warm_up=Call(IMPORT, (list(rules.functions),)),
            network=rules.network,
        )
        return answer

    def _told(self, tool: Tool, answer: Answer) -> ToolResult:
        if answer.reason is None:
            return ToolResult(tool.name, answer.value)
        if answer.reason == "timeout":
            return _failure(tool.name, f"{tool.name} took longer than {self.rules.timeout_seconds:g} s")
        if answer.reason == "crash":
            return _failure(tool.name, f"{tool.name} ended its process")
        return _failure(tool.name, answer.reason.removeprefix("error: "))


def _failure(name: str, what: str) -> ToolResult:
    return ToolResult(name or "unknown", f"error: {what}", failed=True)
