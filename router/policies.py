"""How the router chooses among engines. A policy sees those that may serve a request, and knows nothing of HTTP."""

import hashlib
import math
import random
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence

from milepost.router.asked import Asked
from milepost.router.backends import Backend
from milepost.storage.registry import load_dotted, resolve

GROUP = "milepost.policies"
KEYS_KEPT = 100_000


class Policy(ABC):
    """Chooses an engine for each request; one object serves one router."""

    reads_prompt = False
    """Whether it needs the body of a request, which is then read to its end before an engine is chosen."""

    @abstractmethod
    def choose(self, candidates: Sequence[Backend], asked: Asked) -> Backend:
        """One of `candidates`, of which there is at least one."""

    def forget(self, backend_id: str) -> None:  # noqa: B027  (most have nothing to forget)
        """What that engine has cached is gone."""


def least_busy(candidates: Sequence[Backend]) -> Backend:
    """Fewest requests in flight for its weight; among equals the one that was picked longest ago."""
    return min(candidates, key=lambda backend: (backend.load, backend.picked))


class LeastLoaded(Policy):
    """Fewest requests in flight for its weight."""

    def choose(self, candidates: Sequence[Backend], asked: Asked) -> Backend:
        return least_busy(candidates)


class LeastTokens(Policy):
    """Fewest tokens in flight for its weight: prompts, and the longest answers that they allow."""

    reads_prompt = True

    def choose(self, candidates: Sequence[Backend], asked: Asked) -> Backend:
        return min(candidates, key=lambda backend: (backend.tokens / backend.weight, backend.load, backend.picked))


class RoundRobin(Policy):
    """Each in turn, one of twice the weight twice as often."""

    def __init__(self) -> None:
        self._served: dict[str, float] = {}

    def choose(self, candidates: Sequence[Backend], asked: Asked) -> Backend:
        # One that comes late, or back, starts where the others are: it owes nothing for the time it was away.
        start = min((self._served[one.id] for one in candidates if one.id in self._served), default=0.0)
        for one in candidates:
            self._served.setdefault(one.id, start)
        chosen = min(candidates, key=lambda backend: (self._served[backend.id], backend.picked))
        self._served[chosen.id] += 1 / chosen.weight
        return chosen

    def forget(self, backend_id: str) -> None:
        self._served.pop(backend_id, None)


class PowerOfTwo(Policy):
    """The less loaded of two that are drawn (Mitzenmacher 2001)."""

    def choose(self, candidates: Sequence[Backend], asked: Asked) -> Backend:
        return least_busy(random.sample(candidates, 2)) if len(candidates) > 1 else candidates[0]


class ConsistentHash(Policy):
    """The same engine for the same key; when one leaves, only its keys move, and come back with it.

    Rendezvous hashing with weights (Thaler and Ravishankar 1998; Mosharaf et al. 2015). Without a key, least loaded.
    """

    def choose(self, candidates: Sequence[Backend], asked: Asked) -> Backend:
        if not asked.key:
            return least_busy(candidates)
        return max(candidates, key=lambda backend: _rendezvous(asked.key, backend))


def _rendezvous(key: str, backend: Backend) -> float:
    digest = hashlib.blake2b(f"{backend.id}{key}".encode(), digest_size=8).digest()
    return -backend.weight / math.log((int.from_bytes(digest) + 1) / (2**64 + 1))


class Sticky(Policy):
    """The engine that served a key before, as long as it may serve; a new key goes where the load is least."""

    def __init__(self) -> None:
        self._served: OrderedDict[str, str] = OrderedDict()

    def choose(self, candidates: Sequence[Backend], asked: Asked) -> Backend:
        if not asked.key:
            return least_busy(candidates)
        before = self._served.get(asked.key)
        chosen = next((backend for backend in candidates if backend.id == before), None) or least_busy(candidates)
        self._served[asked.key] = chosen.id
        self._served.move_to_end(asked.key)
        if len(self._served) > KEYS_KEPT:
            self._served.popitem(last=False)
        return chosen


POLICIES: dict[str, Callable[[], Policy] | str] = {
    "least_loaded": LeastLoaded,
    "least_tokens": LeastTokens,
    "round_robin": RoundRobin,
    "power_of_two": PowerOfTwo,
    "consistent_hash": ConsistentHash,
    "sticky": Sticky,
    "cache_aware": "milepost.router.cache_aware:CacheAware",
}


def get_policy(name: str) -> Policy:
    """A new policy of that name: a built-in, an entry point, or `pkg.mod:Class`."""
    found = resolve(name, POLICIES, group=GROUP)
    policy: Policy = (load_dotted(found, group=GROUP) if isinstance(found, str) else found)()
    return policy
