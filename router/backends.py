"""The engines behind the router: which exist, which may serve now, and how busy each is.

A backend serves while it is healthy and, when a current weight version is set, only if it holds that version.
"""

import hashlib
import math
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

from milepost.router.asked import ANY_WEIGHTS, Demand

State = Literal["new", "healthy", "stale", "unhealthy", "draining"]

UNHEALTHY_AFTER = 3  # slow answers in a row; a refused connection counts at once
_HIDDEN = ("picked", "tokens")


class BadWorkerUrl(ValueError):
    """The text is not the base URL of an engine, or its weight is none."""


class UnknownWorker(LookupError):
    """No backend has this id."""


@dataclass
class Backend:
    """One engine. `stale` is healthy with other weights than the current ones; `new` has not been probed yet.

    One that is `draining` finishes what it has and gets nothing more. `weight` is its share of the load.
    """

    url: str
    weight: float = 1.0
    state: State = "new"
    in_flight: int = 0
    tokens: int = 0  # in flight, where the policy asks for them
    weight_version: str | None = None
    last_error: str | None = None
    failures: int = 0  # in a row
    picked: int = 0  # the pool's count of picks when this one was last picked
    id: str = field(init=False)

    def __post_init__(self) -> None:
        self.id = hashlib.sha256(self.url.encode()).hexdigest()[:12]

    @property
    def load(self) -> float:
        """Requests in flight for its weight."""
        return self.in_flight / self.weight

    def as_json(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if key not in _HIDDEN}


Watcher = Callable[[Backend, State], None]
"""Called with a backend whose state or weights have changed, and the state before."""


def backend_url(text: str) -> str:
    """`text` as the base URL of a backend; BadWorkerUrl unless it is `http[s]://host[:port][/prefix]`."""
    try:
        parts = urlsplit(text)
        _ = parts.port
    except ValueError as error:
        raise BadWorkerUrl(f"worker url {text!r} is not a URL: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise BadWorkerUrl(f"worker url {text!r} is not of the form 'http://host:port'")
    return text.rstrip("/")


class BackendPool:
    """All backends, by id. Only the event loop that serves the router touches it, so it needs no lock."""

    def __init__(self, urls: Collection[str] = ()) -> None:
        self._backends: dict[str, Backend] = {}
        self._current: str | None = None
        self._picks = 0
        self._watchers: list[Watcher] = []
        for url in urls:
            self.add(url)

    @property
    def current(self) -> str | None:
        """The weight version a backend must hold to serve; None when any will do."""
        return self._current

    def watch(self, watcher: Watcher) -> None:
        self._watchers.append(watcher)

    def add(self, url: str, weight: float = 1.0) -> Backend:
        """The backend at `url`, new unless it was there already; one that was draining serves again once it is well."""
        if not (weight > 0 and math.isfinite(weight)):
            raise BadWorkerUrl(f"worker {url!r} has weight {weight}, it must be more than 0")
        backend = self._backends.setdefault(Backend(backend_url(url)).id, Backend(backend_url(url)))
        backend.weight = weight
        if backend.state == "draining":
            self._become(backend, "new")
        return backend

    def get(self, backend_id: str) -> Backend:
        if backend_id not in self._backends:
            raise UnknownWorker(f"no worker {backend_id!r}; known: {sorted(self._backends)}")
        return self._backends[backend_id]

    def drain(self, backend_id: str) -> Backend:
        """Give a backend nothing more to do."""
        backend = self.get(backend_id)
        self._become(backend, "draining")
        return backend

    def remove(self, backend_id: str) -> Backend:
        """Take a backend out; its requests in flight finish."""
        backend = self.drain(backend_id)
        del self._backends[backend_id]
        return backend

    def all(self) -> list[Backend]:
        return list(self._backends.values())

    def rotation(self, demand: Demand = ANY_WEIGHTS, *, tried: Collection[str] = ()) -> list[Backend]:
        """The backends that may serve now, hold the weights that are demanded, and are not among the ids in `tried`."""
        return [
            backend
            for backend in self._backends.values()
            if backend.state == "healthy" and backend.id not in tried and demand.met_by(backend.weight_version)
        ]

    def take(self, backend: Backend, tokens: int = 0) -> None:
        """Count a request as in flight at `backend`."""
        self._picks += 1
        backend.picked = self._picks
        backend.in_flight += 1
        backend.tokens += tokens

    def give_back(self, backend: Backend, tokens: int = 0) -> None:
        backend.in_flight -= 1
        backend.tokens -= tokens

    def answered(self, backend: Backend, weight_version: str | None) -> None:
        """A probe found `backend` well, with these weights."""
        other = backend.weight_version != weight_version
        backend.failures, backend.last_error, backend.weight_version = 0, None, weight_version
        if backend.state != "draining":
            self._become(backend, "healthy" if self._current in (None, weight_version) else "stale", changed=other)

    def failed(self, backend: Backend, error: str, *, at_once: bool) -> None:
        """`backend` did not answer: it leaves rotation at once, or after the third time in a row."""
        backend.failures += 1
        backend.last_error = error
        if backend.state != "draining" and (at_once or backend.failures >= UNHEALTHY_AFTER or backend.state == "new"):
            self._become(backend, "unhealthy")

    def require(self, weight_version: str | None) -> None:
        """Make `weight_version` the current one: backends that hold another leave rotation until a probe finds it."""
        self._current = weight_version
        for backend in self.all():
            if backend.state in ("healthy", "stale"):
                self.answered(backend, backend.weight_version)

    def _become(self, backend: Backend, state: State, *, changed: bool = False) -> None:
        before, backend.state = backend.state, state
        if before != state or changed:
            for watcher in self._watchers:
                watcher(backend, before)
