"""How much of the prompts is in the caches of four engines, by the policy that chooses among them.

    python tests/bench/bench_router_cache.py

Prompts of 10,000 tokens, of which 9,000 are shared by all of a family. An engine has the cache of a model of one: the
blocks used longest ago go first. The best possible is one cache of the size of all, which sees every prompt.
"""

import argparse
import random
from collections import OrderedDict

from milepost.router.asked import Asked
from milepost.router.backends import BackendPool
from milepost.router.policies import get_policy

ENGINES = 4
TOKENS, SHARED, BLOCK = 10_000, 9_000, 16
IN_FLIGHT = 32
POLICIES = ("round_robin", "least_loaded", "power_of_two", "cache_aware")


class PrefixCache:
    """Blocks of tokens by everything up to their end, of which `blocks` are kept."""

    def __init__(self, blocks: int) -> None:
        self._blocks, self._kept = blocks, OrderedDict[int, None]()

    def ask(self, ids: list[int]) -> int:
        """How many tokens of a prompt were there; afterwards all of it is."""
        ends, before = [], 0
        for start in range(0, len(ids) - BLOCK + 1, BLOCK):
            before = hash((before, *ids[start : start + BLOCK]))
            ends.append(before)
        found = next((number for number, end in enumerate(ends) if end not in self._kept), len(ends))
        for end in reversed(ends):
            self._kept[end] = None
            self._kept.move_to_end(end)
        while len(self._kept) > self._blocks:
            self._kept.popitem(last=False)
        return found * BLOCK


def prompts(families: int, requests: int) -> list[list[int]]:
    drawn = random.Random(0)
    starts = [[drawn.randrange(32_000) for _ in range(SHARED)] for _ in range(families)]
    return [
        [*starts[drawn.randrange(families)], *(drawn.randrange(32_000) for _ in range(TOKENS - SHARED))]
        for _ in range(requests)
    ]


def hit_rate(policy_name: str, asked: list[list[int]], blocks: int) -> float:
    """Of tokens, with `IN_FLIGHT` requests at a time that end in the order in which they came."""
    pool, policy = BackendPool([f"http://engine:{number}" for number in range(ENGINES)]), get_policy(policy_name)
    caches = {backend.id: PrefixCache(blocks) for backend in pool.all()}
    running, hits = [], 0
    for ids in asked:
        found = Asked()
        found.__dict__["prompt"] = ids  # as if it had been read from a body
        chosen = policy.choose(pool.all(), found)
        pool.take(chosen)
        running.append(chosen)
        hits += caches[chosen.id].ask(ids)
        if len(running) > IN_FLIGHT:
            pool.give_back(running.pop(0))
    return hits / (TOKENS * len(asked))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", type=int, default=32)
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--held", type=int, default=10, help="families that the cache of an engine has room for")
    options = parser.parse_args()
    asked = prompts(options.families, options.requests)
    blocks = options.held * TOKENS // BLOCK
    whole = PrefixCache(blocks * ENGINES)
    best = sum(whole.ask(ids) for ids in asked) / (TOKENS * len(asked))
    print("| policy | cached share of tokens | of the best possible |", "|---|---|---|", sep="\n")
    print(f"| one cache of all | {best:.3f} | 1.000 |")
    for name in POLICIES:
        rate = hit_rate(name, asked, blocks)
        print(f"| {name} | {rate:.3f} | {rate / best:.3f} |", flush=True)


if __name__ == "__main__":
    main()
