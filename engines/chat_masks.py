"""Which tokens of a dialogue are the assistant's: those that supervised fine-tuning trains.

A chat template that marks them with `{% generation %}` says so itself. Of another one they are found by rendering the
dialogue turn by turn, which needs every beginning of the dialogue to be rendered as the beginning of the whole.
"""

import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

Messages = list[dict[str, Any]]
Span = tuple[int, int]

_GENERATION = re.compile(r"\{%-?\s*generation\b")


def marks_assistant(template: str) -> bool:
    """Whether a chat template has `{% generation %}` around what the assistant says."""
    return _GENERATION.search(template) is not None


def assistant_spans(render: Callable[[Messages, bool], str], messages: Messages) -> list[Span]:
    """Where in the rendered dialogue each turn of the assistant begins, after its header, and ends.

    `render` takes messages and whether the header of an answer follows them. ValueError where a beginning of the
    dialogue is rendered otherwise than the whole begins.
    """
    whole, spans = render(messages, False), []
    for at, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, after = render(messages[:at], True), render(messages[: at + 1], False)
        if not after.startswith(before) or not whole.startswith(after):
            raise ValueError(
                f"the chat template renders message {at} otherwise when others follow or precede it, so its tokens "
                "cannot be told: give the template {% generation %} marks, or a row of its own to each answer"
            )
        spans.append((len(before), len(after)))
    return spans


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
