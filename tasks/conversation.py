"""The tokens of a conversation as engine and tools made them: what was given and what came is kept, token by token."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from milepost.engines.protocols import Completion, GenerateRequest
from milepost.storage.conversation import CONVERSATION
from milepost.tasks.rollout_params import RolloutParams
from milepost.tasks.samples import Sample
from milepost.tasks.tools import ToolResult

Ended = Literal["answer", "abort", "max_turns", "max_new_tokens", "context_length"]
"""Why a conversation ended: with an answer that calls no tool, in the engine, or at one of its limits."""

_FINISHED: dict[str, str] = {"answer": "stop", "abort": "abort"}  # by all others it is cut


def turn_seed(seed: int, turn: int) -> int:
    """The sampling seed of turn `turn`, from 0, of a sample with `seed`: the first has the sample's own."""
    digest = hashlib.sha256(f"{seed}/turn-{turn}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1 if turn else seed


@dataclass
class Conversation:
    """A conversation on its way. `ids`, `logprobs` and `loss_mask` are of what follows the prompt."""

    prompt_ids: list[int]
    params: RolloutParams
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    asked: list[list[int]] = field(default_factory=list)
    heard: list[Completion] = field(default_factory=list)
    told: list[ToolResult] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)

    @property
    def _left(self) -> tuple[int, int]:
        """Tokens that the model may still say, and that still fit the context."""
        said = sum(self.loss_mask)
        used = len(self.prompt_ids) + len(self.ids)
        return self.params.sampling["max_new_tokens"] - said, self.params.context_length - used

    @property
    def limit(self) -> Ended | None:
        """The limit that it has come to."""
        budget, room = self._left
        return "max_new_tokens" if budget < 1 else "context_length" if room < 1 else None

    def request(self) -> GenerateRequest:
        """What the engine is asked next: to go on after all that was said, special tokens included in its text."""
        self.asked.append([*self.prompt_ids, *self.ids])
        sampling = self.params.sampling | {"max_new_tokens": min(self._left), "skip_special_tokens": False}
        sampling["sampling_seed"] = turn_seed(sampling["sampling_seed"], len(self.heard))
        return GenerateRequest(self.params.sample_id, self.asked[-1], sampling)

    def hear(self, said: Completion) -> None:
        """Take what the model said, which is trained on."""
        self._extend(said.output_ids, said.logprobs, 1)
        self.heard.append(said)
        self.messages.append({"role": "assistant", "content": said.text})

    def tell(self, results: Sequence[ToolResult], ids: Sequence[int]) -> bool:
        """Take results and the tokens that tell of them, unless no room for an answer is left behind them."""
        if len(ids) >= self._left[1]:
            return False
        self._extend(ids, [0.0] * len(ids), 0)
        self.told += results
        self.messages += [{"role": "tool", "name": result.name, "content": result.text} for result in results]
        return True

    def _extend(self, ids: Sequence[int], logprobs: Sequence[float], mask: int) -> None:
        self.ids += ids
        self.logprobs += logprobs
        self.loss_mask += [mask] * len(ids)

    def sample(self, ended: Ended, metadata: dict[str, Any]) -> Sample:
        """The whole of it. Its response, which rewards are given, is what the model said last."""
        counted = {
            CONVERSATION: self.messages,
            "ended_by": ended,
            "tool_calls": len(self.told),
            "tool_errors": sum(result.failed for result in self.told),
            "retokenized": retokenized(self.asked, [said.output_ids for said in self.heard]),
        }
        return Sample(
            response=self.heard[-1].text,
            token_ids=self.ids,
            logprobs=self.logprobs,
            loss_mask=self.loss_mask,
            finish_reason=_FINISHED.get(ended, "length"),
            first_version=self.heard[0].weight_version_first,
            last_version=self.heard[-1].weight_version_last,
            turns=len(self.heard),
            metadata=metadata | counted,
        )


def retokenized(asked: Sequence[Sequence[int]], said: Sequence[Sequence[int]]) -> int:
    """Tokens that the engine was given otherwise than it was given or said them the turn before: 0, or a mistake."""
    wrong = 0
    for before, answer, now in zip(asked, said, asked[1:], strict=False):
        known = [*before, *answer]
        same = sum(old == new for old, new in zip(known, now, strict=False))
        wrong += len(known) - same
    return wrong
