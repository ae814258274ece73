"""The order in which prompts are served: a function of seed, epoch and the number of prompts alone.

How the servings are cut into takes changes nothing, and every epoch serves every prompt exactly once.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import pyarrow as pa

from milepost.storage.prompts import PromptSet
from milepost.storage.schema import PROMPTS


class Pick(NamedTuple):
    """One serving: the index of a prompt in its set, and the epoch it is served in."""

    index: int
    epoch: int


@dataclass(frozen=True)
class Order:
    """An endless sequence over `count` prompts, one permutation an epoch; file order without `shuffle`."""

    count: int
    seed: int
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"an order over {self.count} prompts serves none: give at least 1")


@dataclass(frozen=True)
class Cursor:
    """Where serving stands: `position` prompts of `epoch` are served, `served` in all."""

    epoch: int = 0
    position: int = 0
    served: int = 0


@lru_cache(maxsize=4)
def permutation(order: Order, epoch: int) -> tuple[int, ...]:
    """The indices of one epoch, sorted by BLAKE2b of seed, epoch and index: the same on every platform for ever."""
    if not order.shuffle:
        return tuple(range(order.count))
    prefix = hashlib.blake2b(f"{order.seed} {epoch} ".encode(), digest_size=16)

    def rank(index: int) -> tuple[bytes, int]:
        digest = prefix.copy()
        digest.update(str(index).encode())
        return digest.digest(), index

    return tuple(sorted(range(order.count), key=rank))


def take(count: int, cursor: Cursor, order: Order) -> tuple[list[Pick], Cursor]:
    """The next `count` servings, over as many epochs as that needs, and the cursor after them."""
    if count < 0:
        raise ValueError(f"cannot take {count} prompts: give at least 0")
    if not 0 <= cursor.position < order.count:
        raise ValueError(
            f"the cursor is at prompt {cursor.position} of a set of {order.count}: the prompt set is not the one it had"
        )
    picks: list[Pick] = []
    epoch, position = cursor.epoch, cursor.position
    while len(picks) < count:
        stop = min(position + count - len(picks), order.count)
        picks += [Pick(index, epoch) for index in permutation(order, epoch)[position:stop]]
        epoch, position = (epoch, stop) if stop < order.count else (epoch + 1, 0)
    return picks, Cursor(epoch, position, cursor.served + count)


def prompt_table(prompts: PromptSet, picks: Sequence[Pick], *, step: int, round_: int) -> pa.Table:
    """The picked prompts as a table of schema PROMPTS. A group id names step, round and position: unique in a run."""
    chosen = [prompts.prompts[pick.index] for pick in picks]
    columns = {
        name: pa.array([getattr(prompt, name) for prompt in chosen], PROMPTS.field(name).type)
        for name in ("prompt_id", "dataset", "row", "prompt", "prompt_token_ids", "label", "metadata")
    }
    columns["group_id"] = pa.array([group_id(step, round_, position) for position in range(len(picks))], pa.string())
    columns["epoch"] = pa.array([pick.epoch for pick in picks], pa.int32())
    return pa.table([columns[name] for name in PROMPTS.names], schema=PROMPTS)


def group_id(step: int, round_: int, position: int) -> str:
    return f"{step:06d}-{round_}-{position:04d}"
