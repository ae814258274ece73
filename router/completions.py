"""What an engine answers, checked before anything is made of it: nothing is filled in and nothing is guessed."""

import math
from dataclasses import dataclass
from typing import Any, Literal, cast

from milepost.engines.protocols import Completion, WeightVersion

FinishReason = Literal["stop", "length", "abort"]

INT32 = 2**31

# What SGLang says that it stopped at when the model's output was not a number.
NOT_A_NUMBER = "NaN happened"


class UnsoundCompletion(ValueError):
    """An answer that cannot be trained on, and why; what of it can be kept all the same is in the attributes."""

    def __init__(self, sample_id: str, reason: str, *, text: str, ids: list[int], finish_reason: FinishReason) -> None:
        super().__init__(f"sample {sample_id!r}: {reason}")
        self.reason = reason
        self.text = text
        self.ids = ids
        self.finish_reason = finish_reason


@dataclass(frozen=True)
class _Said:
    """An answer as it came: the parts that are checked may still be anything."""

    text: str
    finish: dict[str, Any]
    kind: FinishReason
    ids: list[Any]
    pairs: list[tuple[Any, Any]]
    meta: dict[str, Any]


def parse_completion(sample_id: str, answer: Any, *, vocabulary: int = 0) -> Completion:
    """SGLang's answer as a Completion.

    ValueError, which names the sample, for what is no answer of SGLang's; UnsoundCompletion for one that is, with
    tokens, log-probabilities or a weight version that cannot be. `vocabulary` is the number of token ids, 0: not known.
    """
    said = _read(sample_id, answer)
    try:
        first, last = _versions(said.meta)
        logprobs = _checked(said, vocabulary)
    except ValueError as error:
        kept = said.ids if all(_is_id(token, 0) for token in said.ids) else []
        raise UnsoundCompletion(sample_id, str(error), text=said.text, ids=kept, finish_reason=said.kind) from None
    return Completion(said.text, said.ids, logprobs, said.kind, first, last)


def _read(sample_id: str, answer: Any) -> _Said:
    try:
        meta = answer["meta_info"]
        finish = meta["finish_reason"]
        kind = finish["type"]
        # A request that was aborted before its first token has no list of log-probabilities.
        entries = meta.get("output_token_logprobs", []) if kind == "abort" else meta["output_token_logprobs"]
        pairs = [(entry[0], entry[1]) for entry in entries]
        ids = list(answer.get("output_ids", [token for _, token in pairs]))
        text = answer["text"]
    except KeyError as error:
        raise ValueError(f"sample {sample_id!r}: the answer has no {error}") from None
    except (TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"sample {sample_id!r}: the answer is not SGLang's: {error}") from None
    if not isinstance(text, str):
        raise ValueError(f"sample {sample_id!r}: the answer's text is {text!r}, not a string")
    if kind not in ("stop", "length", "abort"):
        raise ValueError(f"sample {sample_id!r}: finish reason {kind!r} is none of stop, length, abort")
    return _Said(text, finish, cast(FinishReason, kind), ids, pairs, meta)


def _versions(meta: dict[str, Any]) -> tuple[WeightVersion, WeightVersion]:
    """Of the first and the last token: SGLang lists them all, the embedded engine names a first that differs."""
    last = meta.get("weight_version")
    if not isinstance(last, str):
        raise ValueError(f"the weight version is {last!r}: the engine stamped none")
    spans = meta.get("weight_versions")
    first: str = spans[0]["version"] if spans else meta.get("weight_version_first") or last
    return WeightVersion.parse(first), WeightVersion.parse(last)


def _checked(said: _Said, vocabulary: int) -> list[float]:
    """The log-probabilities, one finite number for each token, of tokens that the model has."""
    if len(said.ids) != len(said.pairs):
        raise ValueError(f"{len(said.ids)} tokens came with {len(said.pairs)} log-probabilities")
    for position, (token, (logprob, of)) in enumerate(zip(said.ids, said.pairs, strict=True)):
        if not _is_id(token, vocabulary):
            tokens = f" of {vocabulary} tokens" if vocabulary else ""
            raise ValueError(f"token {position} is {token!r}, which is not in the vocabulary{tokens}")
        if token != of:
            raise ValueError(f"token {position} is {token}, its log-probability is of {of}")
        if isinstance(logprob, bool) or not isinstance(logprob, int | float) or not math.isfinite(logprob):
            raise ValueError(f"token {position} has the log-probability {logprob}")
    matched = said.finish.get("matched")
    if said.kind == "stop" and isinstance(matched, int) and said.ids[-1:] != [matched]:
        raise ValueError(f"it stopped at token {matched}, and ends with {said.ids[-1:]}")
    if matched == NOT_A_NUMBER:
        raise ValueError("the model's output is not a number: its weights are damaged")
    return [float(logprob) for logprob, _ in said.pairs]


def _is_id(token: Any, vocabulary: int) -> bool:
    return isinstance(token, int) and not isinstance(token, bool) and 0 <= token < (vocabulary or INT32)
