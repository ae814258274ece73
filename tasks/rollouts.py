"""Rollout functions: from one prompt to one sample, through whatever conversation they like."""

from collections.abc import Awaitable, Callable
from typing import cast

from milepost.engines.protocols import Generate, GenerateRequest
from milepost.storage.registry import check_arity, resolve
from milepost.tasks.multi_turn import multi_turn
from milepost.tasks.rollout_params import RolloutParams as RolloutParams
from milepost.tasks.samples import Prompt, Sample, single

GROUP = "milepost.rollouts"


RolloutFunction = Callable[[Generate, Prompt, RolloutParams], Awaitable[Sample | list[Sample]]]


async def single_turn(generate: Generate, prompt: Prompt, params: RolloutParams) -> Sample:
    """One completion of the prompt, cut so that prompt and response fit the context."""
    room = params.context_length - len(prompt.token_ids)
    sampling = params.sampling | {"max_new_tokens": min(params.sampling["max_new_tokens"], room)}
    return single(await generate(GenerateRequest(params.sample_id, prompt.token_ids, sampling)))


ROLLOUTS: dict[str, RolloutFunction] = {"single_turn": single_turn, "multi_turn": multi_turn}


def get_rollout(name: str) -> RolloutFunction:
    """The rollout function called `name`; LookupError or ValueError when it does not exist or cannot be called."""
    function = cast(RolloutFunction, resolve(name, ROLLOUTS, group=GROUP))
    check_arity(function, 3, name=name, group=GROUP)
    return function
