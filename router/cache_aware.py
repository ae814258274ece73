"""A policy that sends a prompt where the longest part of its beginning is cached, unless that engine is too busy."""

from array import array
from collections import OrderedDict
from collections.abc import Sequence

from milepost.router.asked import Asked
from milepost.router.backends import Backend
from milepost.router.policies import Policy, least_busy

BLOCK_TOKENS = 32
BLOCK_CHARACTERS = 128
BLOCKS_KEPT = 1 << 18  # of each engine: those used longest ago are forgotten first, as an engine does
BUSIER_BY = 32  # requests that one may have more than the least loaded
BUSIER_TIMES = 1.5  # and how many times as many; past both, the load decides


class CacheAware(Policy):
    """The longest beginning that an engine has seen wins; past the balance threshold, and for a tie, the load does.

    A prompt is cut into blocks, each known by the hash of everything up to its end. What an engine has cached is what
    was sent there since its weights changed.
    """

    reads_prompt = True

    def __init__(self, *, blocks_kept: int = BLOCKS_KEPT) -> None:
        self._blocks_kept = blocks_kept
        self._seen: dict[str, OrderedDict[int, None]] = {}

    def choose(self, candidates: Sequence[Backend], asked: Asked) -> Backend:
        blocks = prompt_blocks(asked.prompt)
        chosen = least_busy(candidates)
        if not _unbalanced(candidates):
            cached = {backend.id: self._cached(backend, blocks) for backend in candidates}
            longest = max(cached.values())
            chosen = least_busy([backend for backend in candidates if cached[backend.id] == longest])
        self._remember(chosen, blocks)
        return chosen

    def forget(self, backend_id: str) -> None:
        self._seen.pop(backend_id, None)

    def _cached(self, backend: Backend, blocks: list[int]) -> int:
        """How many of the first blocks the engine has seen."""
        seen = self._seen.get(backend.id, OrderedDict[int, None]())
        return next((count for count, block in enumerate(blocks) if block not in seen), len(blocks))

    def _remember(self, backend: Backend, blocks: list[int]) -> None:
        seen = self._seen.setdefault(backend.id, OrderedDict())
        for block in reversed(blocks):  # the first was used last, so that no block outlives the ones before it
            seen[block] = None
            seen.move_to_end(block)
        while len(seen) > self._blocks_kept:
            seen.popitem(last=False)


def prompt_blocks(prompt: list[int] | str) -> list[int]:
    """A hash of everything up to the end of each whole block; another process has other hashes."""
    try:
        content = array("q", prompt).tobytes() if isinstance(prompt, list) else prompt.encode("utf-8", "surrogatepass")
    except OverflowError:  # no token has such an id
        return []
    size = BLOCK_TOKENS * 8 if isinstance(prompt, list) else BLOCK_CHARACTERS
    blocks, before = [], 0
    for start in range(0, len(content) - size + 1, size):
        before = hash((before, content[start : start + size]))
        blocks.append(before)
    return blocks


def _unbalanced(candidates: Sequence[Backend]) -> bool:
    loads = [backend.load for backend in candidates]
    return max(loads) > min(loads) + BUSIER_BY and max(loads) > BUSIER_TIMES * min(loads)
