"""The sequences that run together and those that wait to join: confined to one thread, the scheduler's."""

import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import Any, Protocol

from milepost.engines.embedded_sequence import Decode, Sequence


def fill_holes(leaving: Collection[int], count: int) -> list[int]:
    """The old index of each row that remains of `count`, with the last ones moved into the places of those leaving."""
    gone = set(leaving)
    remaining = count - len(gone)
    movers = iter([row for row in range(remaining, count) if row not in gone])
    return [next(movers) if row in gone else row for row in range(remaining)]


class SequenceModel(Protocol):
    """What generates: rows of sequences that advance together, one token a step."""

    vocab_size: int
    context_length: int

    def join(self, sequences: list[Sequence]) -> None:
        """Add a row, after the existing ones, for each of `sequences`, at the end of its prompt."""
        ...

    def step(self) -> list[tuple[int, float] | None]:
        """The next token of each row and its log-probability; None for a row that has none yet."""
        ...

    def keep(self, order: list[int]) -> None:
        """Make the rows those at `order`; the others have left."""
        ...

    def release(self) -> None:
        """Free what running sequences needed; there are none."""
        ...

    def stage_weights(
        self, uri: str, *, expected_digest: str | None, builds_on: bool = False
    ) -> tuple[str, Callable[[], None]]:
        """Read and check weights; their digest, and what puts them into the model. Raises ValueError.

        `builds_on` says that the folder may be of changes to the weights in the model.
        """
        ...

    def stage_tensors(
        self, tensors: dict[str, Any], *, expected_digest: str | None, uri: str
    ) -> tuple[str, Callable[[], None]]:
        """As `stage_weights`, of tensors that came from `uri`."""
        ...

    def weights_digest(self) -> str:
        """The digest of the weights in the model."""
        ...


class Batch:
    """At most `max_running` sequences in a model's rows, in the model's order, and a queue of waiting ones."""

    def __init__(self, model: SequenceModel, *, max_running: int, decode: Decode) -> None:
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._model = model
        self._max_running = max_running
        self._decode = decode

    def admit(self, version: str) -> None:
        """Let waiting sequences join while there is room."""
        room = self._max_running - len(self.running)
        joining = [self.waiting.popleft() for _ in range(min(room, len(self.waiting)))]
        if joining:
            for sequence in joining:
                sequence.begin(version)
            self.running += joining
            self._model.join(joining)

    def may_double(self) -> bool:
        """Whether those waiting are as many as those running, and there is room for more."""
        return len(self.running) <= len(self.waiting) < self._max_running - len(self.running)

    def step(self, version: str) -> None:
        """One token for every running sequence; those that finish leave at once."""
        finished = []
        for row, (sequence, drawn) in enumerate(zip(self.running, self._model.step(), strict=True)):
            if drawn is None:
                continue
            sequence.append(*drawn, version=version, decode=self._decode)
            if sequence.finish_reason is not None:
                finished.append(row)
            elif sequence.on_progress is not None:
                sequence.on_progress(sequence)
        if finished:
            for sequence in self._leave(finished):
                sequence.on_finish(sequence)

    def retract(self) -> None:
        """Send the running sequences back to the head of the queue, to start over from their prompts."""
        self.waiting.extendleft(reversed(self._leave(range(len(self.running)))))

    def abort(self, wanted: Callable[[Sequence], bool], *, message: str, version: str) -> None:
        """Finish the sequences that are `wanted` with what they have."""
        rows = [row for row, sequence in enumerate(self.running) if wanted(sequence)]
        waiting = [sequence for sequence in self.waiting if wanted(sequence)]
        for sequence in waiting:
            self.waiting.remove(sequence)
            sequence.begin(version)
        for sequence in itertools.chain(self._leave(rows), waiting):
            sequence.finish("abort", message=message)
            sequence.on_finish(sequence)

    def _leave(self, rows: Iterable[int]) -> list[Sequence]:
        leaving = sorted(rows)
        left = [self.running[row] for row in leaving]
        if left:
            order = fill_holes(leaving, len(self.running))
            self.running = [self.running[row] for row in order]
            self._model.keep(order)
        return left
