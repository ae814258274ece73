"""What was said after a prompt: one answer, or the turns of a conversation, which a sample's metadata then hold."""

from collections.abc import Mapping
from typing import Any

from milepost.storage.messages import Messages

CONVERSATION = "conversation"
"""Where metadata have the messages after the prompt: what the model said as it said it, and what tools answered."""


def said_after(metadata: Mapping[str, Any], response: str) -> Messages:
    """The messages after the prompt."""
    found = metadata.get(CONVERSATION)
    if isinstance(found, list) and found and all(isinstance(message, dict) for message in found):
        return found
    return [{"role": "assistant", "content": response}]
