"""Several prompt sets served as one: every take has of each set its share by weight, and each set its own epochs.

How many of the first N servings are of which set follows from N and the weights alone, so a cursor needs no more than
for one set, and how servings are cut into takes changes nothing of what is served.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from itertools import accumulate
from typing import Any

from milepost.storage.prompt_order import Cursor, Pick, take

SETS = "sets"  # in the data of a run's record


@dataclass(frozen=True)
class Share:
    """A set in a mixture: `rows` of the table of prompts, behind those of the sets before it."""

    name: str
    rows: int
    weight: float
    too_long: int = 0
    bad_lines: int = 0


def shares_of(data: dict[str, Any]) -> tuple[Share, ...]:
    """The shares that the data of a run's record name; none in a run of a single set."""
    return tuple(Share(**found) for found in data.get(SETS, []))


def shares_entry(shares: Sequence[Share]) -> dict[str, Any]:
    """For the data of a run's record."""
    return {SETS: [asdict(share) for share in shares]} if shares else {}


def counts(served: int, shares: Sequence[Share]) -> list[int]:
    """How many of the first `served` servings are of each set: never less for more servings, and exact where it can be.

    Each set takes its part, rounded, of what those before it have left; decimal weights are taken as they are written.
    """
    weights = [Fraction(str(share.weight)) for share in shares]
    rest, found = served, []
    for place, weight in enumerate(weights[:-1]):
        found.append(int(rest * weight / sum(weights[place:]) + Fraction(1, 2)))
        rest -= found[-1]
    return [*found, rest]


def serve(
    count: int, cursor: Cursor, *, size: int, seed: int, shuffle: bool = True, shares: Sequence[Share] = ()
) -> tuple[list[Pick], Cursor]:
    """The next `count` servings of `size` prompts in all, and the cursor after; see `take`, which serves a single set.

    In a mixture an epoch of the cursor is as many servings as there are prompts; that of a pick is its set's own.
    """
    if not shares:
        return take(count, cursor, size=size, seed=seed, shuffle=shuffle)
    if sum(share.rows for share in shares) != size or cursor.served != cursor.epoch * size + cursor.position:
        raise ValueError(f"the cursor is at {cursor} of a mixture of {size} prompts: it was made for other prompt sets")
    before, after = counts(cursor.served, shares), counts(cursor.served + count, shares)
    first_rows = accumulate((share.rows for share in shares), initial=0)
    lanes = []
    for share, first, start, stop in zip(shares, first_rows, before, after, strict=False):
        own = Cursor(*divmod(start, share.rows), start)
        picks, _ = take(stop - start, own, size=share.rows, seed=_seed(seed, share.name), shuffle=shuffle)
        lanes.append([(first + index, epoch) for index, epoch in picks])
    return _spread(lanes, f"{seed} {cursor.served}"), Cursor(
        *divmod(cursor.served + count, size), cursor.served + count
    )


def _seed(seed: int, name: str) -> int:
    """Of the order of one set, whatever the others are."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest(), "big")


def _spread(lanes: Sequence[Sequence[Pick]], salt: str) -> list[Pick]:
    """The picks of all sets mixed, those of one in their order: a shard, a slice of them, has some of each."""
    places = [number for number, lane in enumerate(lanes) for _ in lane]
    order = sorted(range(len(places)), key=lambda place: hashlib.blake2b(f"{salt} {place}".encode()).digest())
    left = [iter(lane) for lane in lanes]
    return [next(left[places[place]]) for place in order]
