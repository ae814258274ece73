"""The order in which prompts are served: a function of seed, epoch and the number of prompts alone.

How the servings are cut into takes changes nothing, and every epoch serves every prompt exactly once.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import pyarrow as pa

from milepost.storage.tables import with_columns

Pick = tuple[int, int]
"""One serving: the index of a prompt in its set, and the epoch it is served in."""


@dataclass(frozen=True)
class Cursor:
    """Where serving stands: `position` prompts of `epoch` are served, `served` in all."""

    epoch: int = 0
    position: int = 0
    served: int = 0


@lru_cache(maxsize=4)
def permutation(size: int, seed: int, epoch: int) -> tuple[int, ...]:
    """The indices of one epoch, sorted by BLAKE2b of seed, epoch and index: the same on every platform for ever."""
    prefix = hashlib.blake2b(f"{seed} {epoch} ".encode(), digest_size=16)

    def rank(index: int) -> tuple[bytes, int]:
        digest = prefix.copy()
        digest.update(str(index).encode())
        return digest.digest(), index

    return tuple(sorted(range(size), key=rank))


def take(count: int, cursor: Cursor, *, size: int, seed: int, shuffle: bool = True) -> tuple[list[Pick], Cursor]:
    """The next `count` servings of a set of `size` prompts, over as many epochs as that needs, and the cursor after.

    Without `shuffle` every epoch is in file order.
    """
    _check(count, cursor, size)
    picks: list[Pick] = []
    epoch, position = cursor.epoch, cursor.position
    while len(picks) < count:
        stop = min(position + count - len(picks), size)
        order = permutation(size, seed, epoch) if shuffle else range(size)
        picks += [(index, epoch) for index in order[position:stop]]
        epoch, position = (epoch, stop) if stop < size else (epoch + 1, 0)
    return picks, Cursor(epoch, position, cursor.served + count)


def _check(count: int, cursor: Cursor, size: int) -> None:
    if count < 0:
        raise ValueError(f"cannot take {count} prompts: give at least 0")
    if size < 1:
        raise ValueError("a set of 0 prompts has none to serve: give at least 1")
    if not 0 <= cursor.position < size:
        raise ValueError(
            f"the cursor is at prompt {cursor.position} of a set of {size}: it was made for another prompt set"
        )


def prompt_table(prompts: pa.Table, picks: Sequence[Pick], *, step: int, round_: int) -> pa.Table:
    """The picked rows of a prompt set, as served. A group id names step, round and position: unique in a run."""
    served = prompts.take(pa.array([index for index, _ in picks], pa.int64()))
    columns: dict[str, list[object]] = {
        "group_id": [group_id(step, round_, position) for position in range(len(picks))],
        "epoch": [epoch for _, epoch in picks],
    }
    return with_columns(served, columns)


def group_id(step: int, round_: int, position: int) -> str:
    return f"{step:06d}-{round_}-{position:04d}"
