"""Two evaluations of the same prompts, compared prompt by prompt. All of it is pure; what is random has a seed."""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from milepost.tasks.eval_scores import Item
from milepost.tasks.intervals import Z_95

SIGNIFICANT = 0.05
FLIPS = 10_000  # of signs, where all of them are more
ALL_FLIPS = 13  # items up to which every combination of signs is tried: 2^13 < FLIPS
SEED = 0


@dataclass(frozen=True)
class Paired:
    """A data set under two checkpoints. `difference` is after - before, with its 95 % interval (None for one item).

    `items` have a score in both; `unmatched` have one in only one of them, and are left out.
    """

    name: str
    items: int
    unmatched: int
    before: float
    after: float
    difference: float
    low: float | None
    high: float | None
    p: float
    test: str

    def dropped(self, max_drop: float) -> bool:
        """The gate: the mean score fell by more than `max_drop`, and the test says that it fell (p < 0.05)."""
        return self.difference < -max_drop and self.p < SIGNIFICANT


def mcnemar(improved: int, worsened: int) -> float:
    """The exact two-sided p-value that as many items became right as became wrong (McNemar 1947)."""
    changed = improved + worsened
    tail = sum(math.comb(changed, count) for count in range(min(improved, worsened) + 1))
    return float(min(1.0, 2 * tail / 2**changed))


def sign_flips(differences: Sequence[float], *, seed: int = SEED) -> float:
    """The two-sided p-value that differences are as likely to have either sign (Fisher's randomization test).

    Exact for few items; for more 10,000 flips are drawn, and what was seen counts as one of them.
    """
    values = np.asarray(differences, dtype=float)
    least = abs(values.sum()) * (1 - 1e-12)
    if len(values) <= ALL_FLIPS:
        sums = [abs(np.dot(values, signs)) for signs in itertools.product((1.0, -1.0), repeat=len(values))]
        return float(np.mean(np.asarray(sums) >= least))
    generator = np.random.default_rng(seed)
    extreme = sum(bool(abs(_flipped(values, generator)) >= least) for _ in range(FLIPS))
    return (extreme + 1) / (FLIPS + 1)


def _flipped(values: "np.ndarray[tuple[int], np.dtype[np.float64]]", generator: np.random.Generator) -> float:
    return float(np.dot(values, generator.integers(0, 2, len(values)) * 2 - 1))


Key = tuple[str, int]


def keyed(items: Sequence[Item]) -> dict[Key, list[float]]:
    """The scores of each item that has one, by prompt and by how often that prompt came before."""
    seen: Counter[str] = Counter()
    found = {}
    for item in items:
        key = item.prompt_id, seen[item.prompt_id]
        seen[item.prompt_id] += 1
        if item.known:
            found[key] = item.known
    return found


def require_shared(name: str, before: Sequence[Item], prompts: Iterable[str]) -> None:
    """ValueError when an evaluation of the set called `name` has no score of any of `prompts`."""
    if {item.prompt_id for item in before if item.known}.isdisjoint(prompts):
        raise ValueError(f"the two evaluations of {name!r} have no item in common: compare them on the same prompts")


def paired(name: str, before: Sequence[Item], after: Sequence[Item]) -> Paired:
    """Compare two evaluations of the set called `name`; ValueError when they share no item.

    McNemar's exact test where every item has one score of 0 or 1 in each, else sign flips of the differences between
    mean scores; the interval is difference +- 1.96 standard errors of these (Miller 2024, arXiv:2411.00640, section 4).
    """
    old, new = keyed(before), keyed(after)
    require_shared(name, before, {prompt for prompt, _ in new})
    shared = [key for key in old if key in new]
    pairs = [(old[key], new[key]) for key in shared]
    means = [(math.fsum(was) / len(was), math.fsum(now) / len(now)) for was, now in pairs]
    differences = [now - was for was, now in means]
    difference = math.fsum(differences) / len(shared)
    half = Z_95 * float(np.std(differences, ddof=1)) / math.sqrt(len(shared)) if len(shared) > 1 else None
    binary = all(len(scores) == 1 and scores[0] in (0.0, 1.0) for pair in pairs for scores in pair)
    p = mcnemar(differences.count(1.0), differences.count(-1.0)) if binary else sign_flips(differences)
    return Paired(
        name=name,
        items=len(shared),
        unmatched=len(old.keys() ^ new.keys()),
        before=math.fsum(was for was, _ in means) / len(shared),
        after=math.fsum(now for _, now in means) / len(shared),
        difference=difference,
        low=None if half is None else difference - half,
        high=None if half is None else difference + half,
        p=p,
        test="McNemar, exact" if binary else "sign flips",
    )
