"""The engines behind the router: which exist, which may serve now, and how busy each is.

A backend serves while it is healthy and, when a current weight version is set, only if it holds that version.
"""

import hashlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

State = Literal["new", "healthy", "stale", "unhealthy"]

UNHEALTHY_AFTER = 3  # slow answers in a row; a refused connection counts at once


class BadWorkerUrl(ValueError):
    """The text is not the base URL of an engine."""


class UnknownWorker(LookupError):
    """No backend has this id."""


@dataclass
class Backend:
    """One engine. `stale` is healthy with other weights than the current ones; `new` has not been probed yet."""

    url: str
    state: State = "new"
    in_flight: int = 0
    weight_version: str | None = None
    last_error: str | None = None
    failures: int = 0  # in a row
    picked: int = 0  # the pool's count of picks when this one was last picked
    id: str = field(init=False)

    def __post_init__(self) -> None:
        self.id = hashlib.sha256(self.url.encode()).hexdigest()[:12]

    def as_json(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if key != "picked"}


Policy = Callable[[Sequence[Backend]], Backend]
"""Chooses among backends that may all serve; there is at least one."""


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
        for url in urls:
            self.add(url)

    @property
    def current(self) -> str | None:
        """The weight version a backend must hold to serve; None when any will do."""
        return self._current

    def add(self, url: str) -> Backend:
        """The backend at `url`, new unless it was there already."""
        backend = Backend(backend_url(url))
        return self._backends.setdefault(backend.id, backend)

    def remove(self, backend_id: str) -> Backend:
        """Take a backend out; its requests in flight finish."""
        if backend_id not in self._backends:
            raise UnknownWorker(f"no worker {backend_id!r}; known: {sorted(self._backends)}")
        return self._backends.pop(backend_id)

    def all(self) -> list[Backend]:
        return list(self._backends.values())

    def rotation(self) -> list[Backend]:
        """The backends that may serve now."""
        return [backend for backend in self._backends.values() if backend.state == "healthy"]

    def pick(self, policy: Policy, *, tried: Collection[str] = ()) -> Backend | None:
        """A backend to serve the next request that is not among the ids in `tried`; None when there is none."""
        candidates = [backend for backend in self.rotation() if backend.id not in tried]
        if not candidates:
            return None
        backend = policy(candidates)
        self._picks += 1
        backend.picked = self._picks
        return backend

    @contextmanager
    def serving(self, backend: Backend) -> Iterator[None]:
        """Count one request of `backend` as in flight."""
        backend.in_flight += 1
        try:
            yield
        finally:
            backend.in_flight -= 1

    def answered(self, backend: Backend, weight_version: str | None) -> None:
        """A probe found `backend` well, with these weights."""
        backend.failures, backend.last_error, backend.weight_version = 0, None, weight_version
        backend.state = "healthy" if self._current in (None, weight_version) else "stale"

    def failed(self, backend: Backend, error: str, *, at_once: bool) -> None:
        """`backend` did not answer: it leaves rotation at once, or after the third time in a row."""
        backend.failures += 1
        backend.last_error = error
        if at_once or backend.failures >= UNHEALTHY_AFTER or backend.state == "new":
            backend.state = "unhealthy"

    def require(self, weight_version: str | None) -> None:
        """Make `weight_version` the current one: backends that hold another leave rotation until a probe finds it."""
        self._current = weight_version
        for backend in self.all():
            if backend.state in ("healthy", "stale"):
                self.answered(backend, backend.weight_version)
