"""A rollout engine without a model: what it answers is a pure function of prompt, seed and weight version.

It stands under the scheduler and HTTP application of the real one, for benchmarks of orchestration and fault tests.
"""

import hashlib
import random
import time
from collections.abc import Callable, Iterable
from functools import partial

from milepost.engines.embedded_sequence import Sequence

FAKE_VOCABULARY = 256
IDLE_SECONDS = 0.001


class CharacterText:
    """Text as its UTF-8 bytes, a token a byte. Byte 0 ends a response."""

    eos_ids = frozenset([0])

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        kept = [id for id in ids if 0 <= id < 256 and not (skip_special_tokens and id in self.eos_ids)]
        return bytes(kept).decode(errors="replace")


class FakeModel:
    """See SequenceModel. A token takes `delay_seconds`, or `slow_seconds` when the prompt holds `slow_token`.

    With `replies`, as token ids, it answers with the first of them that the prompt does not hold, or else the last.
    """

    def __init__(
        self,
        *,
        vocab_size: int = FAKE_VOCABULARY,
        context_length: int = 4096,
        delay_seconds: float = 0.0,
        slow_token: int | None = None,
        slow_seconds: float = 0.0,
        replies: Iterable[Iterable[int]] = (),
    ) -> None:
        self.vocab_size = vocab_size
        self.context_length = context_length
        self._digest = hashlib.blake2b(b"fake weights", digest_size=16).hexdigest()
        self._delay_seconds = delay_seconds
        self._slow_token = slow_token
        self._slow_seconds = slow_seconds
        self._replies = [list(reply) for reply in replies]
        self._rows: list[tuple[Sequence, float, random.Random, list[int]]] = []
        self._due: list[float] = []

    def join(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            is_slow = self._slow_token is not None and self._slow_token in sequence.request.input_ids
            delay = self._slow_seconds if is_slow else self._delay_seconds
            key = f"{sequence.request.input_ids} {sequence.request.params.sampling_seed} {self._digest}"
            self._rows.append((sequence, delay, random.Random(key), self._reply(sequence.request.input_ids)))
            self._due.append(time.monotonic() + delay)

    def step(self) -> list[tuple[int, float] | None]:
        now = time.monotonic()
        if min(self._due) > now:
            time.sleep(min(IDLE_SECONDS, min(self._due) - now))
            now = time.monotonic()
        drawn: list[tuple[int, float] | None] = []
        for row, (sequence, delay, noise, reply) in enumerate(self._rows):
            if self._due[row] > now:
                drawn.append(None)
                continue
            self._due[row] = now + delay
            token = reply[len(sequence.output_ids)] if reply else noise.randrange(self.vocab_size)
            drawn.append((token, -noise.expovariate(1.0)))
        return drawn

    def _reply(self, asked: Iterable[int]) -> list[int]:
        """What it says to a prompt where that is told, up to a token that ends a response."""
        held = _as_text(asked) if self._replies else ""
        unsaid = [reply for reply in self._replies if _as_text(reply) not in held]
        return [*unsaid, *self._replies[-1:], []][0]

    def keep(self, order: list[int]) -> None:
        self._rows = [self._rows[row] for row in order]
        self._due = [self._due[row] for row in order]

    def release(self) -> None:
        assert not self._rows

    def stage_weights(
        self, uri: str, *, expected_digest: str | None, builds_on: bool = False
    ) -> tuple[str, Callable[[], None]]:
        """Nothing is read: the version is taken at its word."""
        digest = expected_digest or hashlib.blake2b(uri.encode(), digest_size=16).hexdigest()
        return digest, partial(setattr, self, "_digest", digest)

    def stage_tensors(
        self, tensors: object, *, expected_digest: str | None, uri: str
    ) -> tuple[str, Callable[[], None]]:
        """As with a folder."""
        return self.stage_weights(uri, expected_digest=expected_digest)

    def weights_digest(self) -> str:
        return self._digest


def _as_text(ids: Iterable[int]) -> str:
    """Token ids so that one list holds another where its text does."""
    return "".join(f" {id} " for id in ids)
