"""A rollout function whose engine, it says, finds every token likelier by half than it does."""

from dataclasses import replace
from typing import Any

from milepost.tasks.rollouts import single_turn
from milepost.tasks.samples import Sample


async def lying(generate: Any, prompt: Any, params: Any) -> Sample:
    sample = await single_turn(generate, prompt, params)
    return replace(sample, logprobs=[value + 0.5 for value in sample.logprobs])
