"""Which tokens of a dialogue are the assistant's: those that supervised fine-tuning trains.

A chat template that marks them with `{% generation %}` says so itself. Of another one they are found by rendering the
dialogue turn by turn. Where a beginning of the dialogue is rendered otherwise than the whole begins, as by templates
that drop earlier thoughts, each answer is learnt in a text of its own: what the model would be asked, and would say.
"""

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

Messages = list[dict[str, Any]]
Span = tuple[int, int]
Render = Callable[[Messages, bool], str]
"""Of messages, and whether the header of an answer follows them."""

_GENERATION = re.compile(r"\{%-?\s*generation\b")


def marks_assistant(template: str) -> bool:
    """Whether a chat template has `{% generation %}` around what the assistant says."""
    return _GENERATION.search(template) is not None


@dataclass(frozen=True)
class Rendered:
    """The text of a dialogue, and where in it the assistant speaks; `asked` is what comes before the first time."""

    asked: Messages
    text: str
    spans: list[Span]


def rendered(render: Render, messages: Messages) -> list[Rendered]:
    """A dialogue with an answer as one text if every answer has a place in it, else its beginning up to each of them.

    ValueError where an answer is rendered otherwise than it is asked for.
    """
    answers = answers_of(messages)
    whole, spans = render(messages, False), [_span(render, messages[: at + 1]) for at in answers]
    if all(whole.startswith(text) for text, _ in spans):
        return [Rendered(messages[: answers[0]], whole, [span for _, span in spans])]
    return [Rendered(messages[:at], text, [span]) for at, (text, span) in zip(answers, spans, strict=True)]


def answers_of(messages: Messages) -> list[int]:
    """Which messages are the assistant's."""
    return [at for at, message in enumerate(messages) if message["role"] == "assistant"]


def _span(render: Render, messages: Messages) -> tuple[str, Span]:
    """The text of messages that end with an answer, and where that begins, after its header, and ends."""
    *earlier, answer = messages
    before, text, at = render(earlier, True), render(messages, False), len(earlier)
    if not text.startswith(before):
        raise ValueError(
            f"the chat template renders message {at} otherwise than it asks for it, so its tokens cannot be told: give "
            "the template {% generation %} marks, or rows of prompt and response"
        )
    if calls := answer.get("tool_calls"):
        others = {**answer, "tool_calls": [_renamed(call) for call in calls]}
        if render([*earlier, others], False) == text:
            raise ValueError(f"the chat template does not show the tool calls of message {at}: take them out")
    return text, (len(before), len(text))


def _renamed(call: Any) -> Any:
    """A call of another tool."""
    if not isinstance(call, dict):
        return call
    return {key: f"{value}_" if key == "name" else _renamed(value) for key, value in call.items()}


def token_mask(
    ids: Sequence[int], offsets: Sequence[Span], spans: Sequence[Span], eos_ids: Collection[int]
) -> list[int]:
    """1 for each token that lies in a span, up to the token that ends the turn, if there is one; else 0.

    What a template puts behind that token, such as a line break, is nothing that a model has to say.
    """
    mask = [0] * len(ids)
    for begin, end in spans:
        inside = [at for at, (first, last) in enumerate(offsets) if begin <= first < last <= end]
        ends = [at for at in inside if ids[at] in eos_ids]
        for at in inside:
            mask[at] = int(not ends or at <= ends[-1])
    return mask
