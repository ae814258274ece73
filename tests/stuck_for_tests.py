"""Extensions that never come back: one for the stage that waits, one that computes, and one inside a trainer rank."""

import asyncio
import time
from typing import Any


async def rollout(generate: Any, prompt: Any, params: Any) -> Any:
    await asyncio.sleep(600)


def group_filter(group: Any) -> Any:
    time.sleep(600)


def loss(inputs: Any, params: Any) -> Any:
    time.sleep(600)
