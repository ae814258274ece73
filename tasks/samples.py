"""A sample as a rollout function returns it, and as a row of the rollouts table."""

import math
from dataclasses import dataclass, field
from typing import Any

from milepost.engines.protocols import Completion, WeightVersion
from milepost.router.completions import UnsoundCompletion
from milepost.storage.text import escape, to_json


@dataclass(frozen=True)
class Prompt:
    """One serving of a prompt. `content` is the text or the message list, `token_ids` what the engine is given."""

    prompt_id: str
    group_id: str
    dataset: str
    content: Any
    token_ids: list[int]
    label: Any
    metadata: dict[str, Any]


@dataclass(frozen=True)
class Sample:
    """One response, of any number of turns. The three token lists have equal length; mask 0 is not trained."""

    response: str
    token_ids: list[int]
    logprobs: list[float]
    loss_mask: list[int]
    finish_reason: str
    first_version: WeightVersion
    last_version: WeightVersion
    turns: int = 1
    metadata: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not len(self.token_ids) == len(self.logprobs) == len(self.loss_mask):
            raise ValueError(
                f"a sample has {len(self.token_ids)} tokens, {len(self.logprobs)} log-probabilities and "
                f"{len(self.loss_mask)} mask entries: they must be equally many"
            )
        if not all(map(math.isfinite, self.logprobs)):
            wrong = next(value for value in self.logprobs if not math.isfinite(value))
            raise ValueError(f"a sample has a log-probability of {wrong}: give those that its tokens were drawn with")


REFILLED, LOST_TOKENS = "refills", "lost_tokens"
"""In the metadata of a sample that was asked for again: how often, and the tokens that the step generated in vain."""

STATUS = {"stop": "completed", "length": "truncated", "abort": "aborted"}

_NEVER = WeightVersion(0, "")
_OF_NO_WEIGHTS = dict.fromkeys(("weight_version_min", "weight_version_max", "weights_digest"))


def single(completion: Completion) -> Sample:
    """A one-turn sample: every token is trained."""
    return Sample(
        response=completion.text,
        token_ids=completion.output_ids,
        logprobs=completion.logprobs,
        loss_mask=[1] * len(completion.output_ids),
        finish_reason=completion.finish_reason,
        first_version=completion.weight_version_first,
        last_version=completion.weight_version_last,
    )


def unasked(prompt: Prompt, *, sample_id: str, seed: int, sampling: dict[str, Any]) -> dict[str, Any]:
    """The columns of a sample that was aborted before any engine was asked, so of no weights."""
    sample = Sample("", [], [], [], "abort", _NEVER, _NEVER, turns=0)
    return row(prompt, sample, sample_id=sample_id, seed=seed, sampling=sampling) | _OF_NO_WEIGHTS


def invalid(
    prompt: Prompt, unsound: UnsoundCompletion, *, sample_id: str, seed: int, sampling: dict[str, Any]
) -> dict[str, Any]:
    """The columns of a sample whose completion cannot be trained on: what of it can be kept, and why it cannot."""
    why = {"invalid": unsound.reason}
    sample = Sample(unsound.text, [], [], [], unsound.finish_reason, _NEVER, _NEVER, metadata=why)
    return (
        row(prompt, sample, sample_id=sample_id, seed=seed, sampling=sampling)
        | _OF_NO_WEIGHTS
        | {"status": "invalid", "response_token_ids": unsound.ids, "rollout_logprobs": None}
        | {"loss_mask": [0] * len(unsound.ids)}
    )


def row(prompt: Prompt, sample: Sample, *, sample_id: str, seed: int, sampling: dict[str, Any]) -> dict[str, Any]:
    """The columns of the rollouts table that generation fills, less run, step and shard."""
    response, escaped = escape(sample.response)
    return {
        "group_id": prompt.group_id,
        "sample_id": sample_id,
        "prompt_id": prompt.prompt_id,
        "dataset": prompt.dataset,
        "prompt": to_json(prompt.content),
        "prompt_token_ids": prompt.token_ids,
        "label": to_json(prompt.label),
        "response": response,
        "response_escaped": escaped,
        "response_token_ids": sample.token_ids,
        "loss_mask": sample.loss_mask,
        "rollout_logprobs": sample.logprobs,
        "finish_reason": sample.finish_reason,
        "status": STATUS[sample.finish_reason],
        "weight_version_min": min(sample.first_version.step, sample.last_version.step),
        "weight_version_max": max(sample.first_version.step, sample.last_version.step),
        "weights_digest": sample.last_version.digest,
        "turns": sample.turns,
        "seed": seed,
        "sampling": to_json(sampling),
        "metadata": to_json({**prompt.metadata, **sample.metadata}),
    }
