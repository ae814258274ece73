"""What an operator and the training loop may do: workers, the current weights, and calls to all workers at once."""

import asyncio
import json
import time
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, ConfigDict

from milepost.router.backends import Backend, BackendPool, BadWorkerUrl
from milepost.router.fan_out import FAN_OUT, ask_each
from milepost.router.health import probe, probe_all
from milepost.router.metrics import RouterMetrics
from milepost.router.policies import Policy

DRAIN_SECONDS = 30.0
DRAIN_POLL_SECONDS = 0.02


class NewWorker(BaseModel):
    """Body of POST /workers. `weight` is its share of the load."""

    model_config = ConfigDict(extra="forbid")
    url: str
    weight: float = 1.0


class CurrentVersion(BaseModel):
    """Body of POST /weight_version; null lets backends with any weights serve."""

    model_config = ConfigDict(extra="forbid")
    weight_version: str | None


class Admin:
    """The endpoints over one pool."""

    def __init__(
        self,
        pool: BackendPool,
        policy: Policy,
        metrics: RouterMetrics,
        *,
        probe_timeout_seconds: float,
        timeout_seconds: float,
    ) -> None:
        self._pool, self._policy, self._metrics = pool, policy, metrics
        self._probe_timeout_seconds = probe_timeout_seconds
        self._timeout_seconds = timeout_seconds

    def routes(self) -> APIRouter:
        router = APIRouter()
        router.add_api_route("/health", self.health, methods=["GET"])
        router.add_api_route("/ready", self.ready, methods=["GET"])
        router.add_api_route("/metrics", self.metrics, methods=["GET"])
        router.add_api_route("/workers", self.list_workers, methods=["GET"])
        router.add_api_route("/workers", self.add_worker, methods=["POST"], status_code=201)
        router.add_api_route("/workers/{worker_id}", self.remove_worker, methods=["DELETE"])
        router.add_api_route("/weight_version", self.set_weight_version, methods=["POST"])
        router.add_api_route("/add_worker", self.add_by_url, methods=["POST"])
        router.add_api_route("/remove_worker", self.remove_by_url, methods=["POST"])
        router.add_api_route("/list_workers", self.list_urls, methods=["GET"])
        for path in FAN_OUT:
            router.add_api_route(path, self.ask_all, methods=["GET", "POST"])
        return router

    async def health(self) -> dict[str, Any]:
        """The router runs; `able` is how many workers may serve."""
        return {"status": "ok", "workers": len(self._pool.all()), "able": len(self._pool.rotation())}

    async def ready(self) -> JSONResponse:
        """200 while at least one worker may serve, 503 otherwise."""
        able = len(self._pool.rotation())
        content = {"status": "ok" if able else "no worker can serve", "workers": len(self._pool.all()), "able": able}
        return JSONResponse(content, status_code=200 if able else 503)

    async def metrics(self) -> Response:
        return Response(self._metrics.text(), media_type=CONTENT_TYPE_LATEST)

    async def list_workers(self) -> dict[str, Any]:
        workers = [backend.as_json() for backend in self._pool.all()]
        return {"weight_version": self._pool.current, "workers": workers}

    async def add_worker(self, worker: NewWorker, request: Request) -> dict[str, Any]:
        return (await self._add(worker.url, worker.weight, request)).as_json()

    async def _add(self, url: str, weight: float, request: Request) -> Backend:
        backend = self._pool.add(url, weight)
        await probe(self._pool, request.state.client, backend, self._probe_timeout_seconds)
        return backend

    async def remove_worker(self, worker_id: str, drain_seconds: float = DRAIN_SECONDS) -> dict[str, Any]:
        """Give it nothing more, wait until what it has is done, and take it out: after `drain_seconds` in any case."""
        backend = self._pool.drain(worker_id)
        until = time.monotonic() + drain_seconds
        while backend.in_flight and time.monotonic() < until:
            await asyncio.sleep(DRAIN_POLL_SECONDS)
        if backend.state == "draining" and backend in self._pool.all():  # nobody has taken it in again meanwhile
            self._pool.remove(worker_id)
        return backend.as_json()

    async def set_weight_version(self, current: CurrentVersion, request: Request) -> dict[str, Any]:
        """Set what is current and look at once who holds it, so that the answer says who serves from now on."""
        self._pool.require(current.weight_version)
        await probe_all(self._pool, request.state.client, self._probe_timeout_seconds)
        return await self.list_workers()

    async def add_by_url(self, request: Request) -> dict[str, Any]:
        """As Miles and older SGLang routers have it: `url` or `worker_url`, in the query or a JSON body."""
        await self._add(await _named_url(request), 1.0, request)
        return await self.list_urls()

    async def remove_by_url(self, request: Request) -> dict[str, Any]:
        await self.remove_worker(Backend((await _named_url(request)).rstrip("/")).id)
        return await self.list_urls()

    async def list_urls(self) -> dict[str, Any]:
        return {"urls": [backend.url for backend in self._pool.all()]}

    async def ask_all(self, request: Request) -> JSONResponse:
        """POST the same body to every worker: 200 when all of them agreed, else 502, with each one's answer."""
        backends = self._pool.all()
        answers = await ask_each(
            request.state.client,
            backends,
            request.url.path,
            await request.body(),
            request.headers.get("content-type", "application/json"),
            timeout_seconds=self._timeout_seconds,
        )
        if request.url.path == "/flush_cache":
            for backend in backends:
                self._policy.forget(backend.id)
        agreed = all(answer.get("status", 500) < 400 for answer in answers)
        return JSONResponse({"workers": answers}, status_code=(200 if agreed else 502) if answers else 503)


async def _named_url(request: Request) -> str:
    """BadWorkerUrl when no URL is named."""
    body = await request.body()
    try:
        given = json.loads(body) if body else {}
    except ValueError:
        given = {}
    named = {**(given if isinstance(given, dict) else {}), **request.query_params}
    url = named.get("url") or named.get("worker_url")
    if not isinstance(url, str):
        raise BadWorkerUrl(f"{request.url.path} names no worker: give url or worker_url")
    return url
