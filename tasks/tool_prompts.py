"""Prompts that tell the model of tools: by the chat template or, where that has no place for it, the system message."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from milepost.engines.tokenizer import Tokenizer
from milepost.storage.messages import Messages
from milepost.storage.parameters import RolloutSection
from milepost.storage.prompt_rows import Tools
from milepost.tasks.tool_calls import tool_format
from milepost.tasks.tools import load_tools, name_of

# As Hermes 2 Pro and Qwen 2.5 were taught it.
_HERMES = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{definitions}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


@dataclass(frozen=True)
class ToolPrompts:
    """A tokenizer for the prompts of a run with `tools`. A prompt that has tools of its own shows only those."""

    tokenizer: Tokenizer
    tools: Tools
    in_system: bool

    def render(self, messages: Messages | str, tools: Tools | None = None) -> list[int]:
        """Ids of a prompt that shows its tools. ValueError for one of its own that no function is for."""
        known = [name_of(tool) for tool in self.tools]
        for name in map(name_of, tools or []):
            if name not in known:
                raise ValueError(f"no function of rollout.tools is called {name!r}; they are {known}")
        shown = tools or self.tools
        if not self.in_system:
            return self.tokenizer.render(messages, shown)
        return self.tokenizer.render(_in_system(messages, shown))

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)


def tool_prompts(tokenizer: Tokenizer, rollout: RolloutSection) -> ToolPrompts:
    """`tokenizer` for prompts with the tools of `rollout`.

    LookupError or ValueError when conversations with tools cannot be had through its chat template.
    """
    tools = [tool.definition for tool in load_tools(rollout.tools).values()]
    tool_format(rollout.tool_format, tokenizer.chat_template)
    tokenizer.tool_turns().check()
    is_shown = tokenizer.shows_tools(tools)
    if not is_shown and rollout.tool_format != "hermes":
        raise ValueError(
            "the chat template does not show tools to the model: set rollout.tool_format=hermes, which writes them "
            "into the system message, or take another model"
        )
    return ToolPrompts(tokenizer, tools, in_system=not is_shown)


def _in_system(messages: Messages | str, tools: Sequence[dict[str, Any]]) -> Messages:
    """The messages with the tools at the end of the system message, which comes first."""
    text = _HERMES.format(definitions="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    talk = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    if not talk or talk[0]["role"] != "system":
        return [{"role": "system", "content": text}, *talk]
    content = talk[0]["content"]
    said = f"{content}\n\n{text}" if isinstance(content, str) else [*(content or []), {"type": "text", "text": text}]
    return [talk[0] | {"content": said}, *talk[1:]]
