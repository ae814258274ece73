"""One completion on its way: the tokens so far, the weights they came from, and why it ended."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from milepost.engines.embedded_request import CompletionRequest

Decode = Callable[..., str]


@dataclass(eq=False)
class Sequence:
    """`on_progress` and `on_finish` are called from the scheduler's thread.

    `finish_reason` is set once, last, and has SGLang's shape: {"type": "stop" | "length" | "abort", ...}.
    `cached_tokens` of the prompt were not read for it, because another sequence had read the same.
    """

    request: CompletionRequest
    stop_ids: frozenset[int]
    max_new_tokens: int
    on_finish: Callable[["Sequence"], None]
    on_progress: Callable[["Sequence"], None] | None = None
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    version_first: str = ""
    version_last: str = ""
    cached_tokens: int = 0
    finish_reason: dict[str, Any] | None = None

    def begin(self, version: str) -> None:
        """Start, or start again, from the prompt: whatever was generated is forgotten."""
        self.output_ids, self.logprobs = [], []
        self.version_first = self.version_last = version

    def append(self, token: int, logprob: float, *, version: str, decode: Decode) -> None:
        """Take the next token, and finish when it is the last."""
        if logprob != logprob:
            self.finish("abort", message="the model's output is not a number: its weights are damaged")
            return
        self.output_ids.append(token)
        self.logprobs.append(logprob)
        self.version_last = version
        count = len(self.output_ids)
        if token in self.stop_ids and count >= self.request.params.min_new_tokens:
            self.finish("stop", matched=token)
        elif self.request.params.stop and (found := self._stop_string(decode)) is not None:
            self.finish("stop", matched=found)
        elif count >= self.max_new_tokens:
            self.finish("length", length=count)

    def finish(self, kind: str, **details: Any) -> None:
        self.finish_reason = {"type": kind, **details}

    def text(self, decode: Decode) -> str:
        """The text so far, without what made it stop unless that was asked for."""
        params, ids = self.request.params, self.output_ids[: len(self.logprobs)]
        matched = None if params.no_stop_trim or self.finish_reason is None else self.finish_reason.get("matched")
        if isinstance(matched, int):
            ids = ids[:-1]
        text = decode(ids, skip_special_tokens=params.skip_special_tokens)
        return text[: text.find(matched)] if isinstance(matched, str) and matched in text else text

    def _stop_string(self, decode: Decode) -> str | None:
        """The stop string that the text now holds, the first of them in the text. Only its end can be new."""
        params = self.request.params
        if len(self.output_ids) < params.min_new_tokens:
            return None
        # A token adds at least one byte, but special tokens may add none to the text.
        window = 2 * max(len(stop.encode()) for stop in params.stop) + 8
        if not any(stop in decode(self.output_ids[-window:], skip_special_tokens=False) for stop in params.stop):
            return None
        text = decode(self.output_ids, skip_special_tokens=params.skip_special_tokens)
        found = [(text.find(stop), stop) for stop in params.stop if stop in text]
        return min(found)[1] if found else None
