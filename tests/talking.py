"""A character tokenizer whose chat template knows tools, and an engine that says what it is told to."""

import json
import string
from collections.abc import Sequence
from pathlib import Path

from milepost.engines.protocols import Completion, GenerateRequest
from milepost.engines.tokenizer import Tokenizer, load_tokenizer, write_character_tokenizer
from milepost.router.client import GenerationStopped
from milepost.storage.weight_version import WeightVersion

HERMES = """{%- if tools %}system: {{ tools | tojson }}{{ eos_token }}
{% endif %}
{%- for message in messages %}
{{- message.role }}: {{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}
{{- eos_token }}
{% endfor %}
{%- if add_generation_prompt %}assistant: {% endif %}"""

TOOLS = "tests.tools_for_tests"


def tokenizer_with(template: str, folder: Path) -> Tokenizer:
    """A character tokenizer with this chat template."""
    write_character_tokenizer(str(folder), string.ascii_letters + string.digits + string.punctuation + " \n")
    (folder / "chat_template.jinja").write_text(template)
    return load_tokenizer(str(folder))


def call_of(name: str, **arguments: object) -> str:
    """A call as Hermes writes it."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


class Script:
    """Generate: one reply after the other, each ended by the end token unless it has another reason to finish.

    Behind the last, generation is stopped.
    """

    def __init__(self, tokenizer: Tokenizer, replies: Sequence[str | tuple[str, str]]) -> None:
        self.requests: list[GenerateRequest] = []
        self._tokenizer = tokenizer
        self._replies = list(replies)

    async def __call__(self, request: GenerateRequest) -> Completion:
        self.requests.append(request)
        if len(self.requests) > len(self._replies):
            raise GenerationStopped(request.sample_id)
        reply = self._replies[len(self.requests) - 1]
        text, reason = (reply, "stop") if isinstance(reply, str) else reply
        ids = [*self._tokenizer.encode(text), *(sorted(self._tokenizer.eos_ids) if reason == "stop" else [])]
        version = WeightVersion(len(self.requests), "digest")
        return Completion(text, ids, [-0.5] * len(ids), reason, version, version)  # type: ignore[arg-type]
