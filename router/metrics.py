"""What the router counts, for Prometheus."""

import re
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from milepost.router.backends import Backend, BackendPool, State
from milepost.router.line import Line

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
KINDS = ("prompt_tokens", "completion_tokens", "cached_tokens")

_TOKENS = re.compile(rb'"(' + "|".join(KINDS).encode() + rb')"\s*:\s*(\d+)')
_OVERLAP_BYTES = 64  # of a piece, in which a number may begin that ends in the next


class TokenCount:
    """The last counts of tokens that an answer names, which in a stream are those of all of it."""

    def __init__(self) -> None:
        self.found: dict[str, int] = {}
        self._end = b""

    def read(self, piece: bytes) -> None:
        text = self._end + piece
        for kind, number in _TOKENS.findall(text):
            self.found[kind.decode()] = int(number)
        self._end = text[-_OVERLAP_BYTES:]


class RouterMetrics:
    """One set for one router, so that several may be in one process."""

    def __init__(self, pool: BackendPool, line: Line) -> None:
        self._registry = CollectorRegistry()
        self._seconds = Histogram(
            "milepost_router_request_seconds",
            "Time from a request to the end of its answer.",
            ["worker"],
            buckets=SECONDS,
            registry=self._registry,
        )
        self._requests = self._counter(
            "requests", "Requests by the worker that answered, none for the router.", "status"
        )
        self._resends = self._counter("resends", "Requests that were sent again, by the worker that failed.", "reason")
        self._evictions = self._counter("evictions", "Times that a worker left rotation because it failed.")
        self._tokens = self._counter("tokens", "Tokens that answers name.", "kind")
        self._registry.register(_Now(pool, line))
        pool.watch(self._watch)

    def _counter(self, name: str, help_: str, *labels: str) -> Counter:
        return Counter(f"milepost_router_{name}", help_, ["worker", *labels], registry=self._registry)

    def answered(self, worker: str, status: int, seconds: float, tokens: TokenCount) -> None:
        self._seconds.labels(worker).observe(seconds)
        self._requests.labels(worker, str(status)).inc()
        for kind, number in tokens.found.items():
            self._tokens.labels(worker, kind.removesuffix("_tokens")).inc(number)

    def sent_again(self, worker: str, reason: str) -> None:
        self._resends.labels(worker, reason).inc()

    def _watch(self, backend: Backend, before: State) -> None:
        if backend.state == "unhealthy" and before in ("healthy", "stale"):
            self._evictions.labels(backend.url).inc()

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self._registry)


class _Now(Collector):
    """What is so when it is asked for, and is counted nowhere."""

    def __init__(self, pool: BackendPool, line: Line) -> None:
        self._pool, self._line = pool, line

    def collect(self) -> Iterator[Any]:
        in_flight = GaugeMetricFamily("milepost_router_in_flight", "Requests at a worker now.", labels=["worker"])
        up = GaugeMetricFamily(
            "milepost_router_worker_up", "1 for a worker that may serve.", labels=["worker", "state"]
        )
        for backend in self._pool.all():
            in_flight.add_metric([backend.url], backend.in_flight)
            up.add_metric([backend.url, backend.state], float(backend.state == "healthy"))
        waiting = GaugeMetricFamily("milepost_router_waiting", "Requests that wait for a place at a worker.")
        waiting.add_metric([], self._line.length)
        yield from (in_flight, up, waiting)
