"""What an operator and the training loop may do: workers, the current weights, and calls to all workers at once."""

import asyncio
import json
from typing import Any

import aiohttp
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict

from milepost.router.backends import Backend, BackendPool
from milepost.router.health import describe, probe, probe_all

FAN_OUT = ("/pause_generation", "/continue_generation", "/abort_request", "/flush_cache")


class NewWorker(BaseModel):
    """Body of POST /workers."""

    model_config = ConfigDict(extra="forbid")
    url: str


class CurrentVersion(BaseModel):
    """Body of POST /weight_version; null lets backends with any weights serve."""

    model_config = ConfigDict(extra="forbid")
    weight_version: str | None


class Admin:
    """The endpoints over one pool."""

    def __init__(self, pool: BackendPool, *, probe_timeout_seconds: float, timeout_seconds: float) -> None:
        self._pool = pool
        self._probe_timeout_seconds = probe_timeout_seconds
        self._timeout_seconds = timeout_seconds

    def routes(self) -> APIRouter:
        router = APIRouter()
        router.add_api_route("/health", self.health, methods=["GET"])
        router.add_api_route("/workers", self.list_workers, methods=["GET"])
        router.add_api_route("/workers", self.add_worker, methods=["POST"], status_code=201)
        router.add_api_route("/workers/{worker_id}", self.remove_worker, methods=["DELETE"])
        router.add_api_route("/weight_version", self.set_weight_version, methods=["POST"])
        for path in FAN_OUT:
            router.add_api_route(path, self.ask_all, methods=["GET", "POST"])
        return router

    async def health(self) -> JSONResponse:
        """200 while at least one worker may serve, 503 otherwise."""
        able = len(self._pool.rotation())
        content = {"status": "ok" if able else "no worker can serve", "workers": len(self._pool.all()), "able": able}
        return JSONResponse(content, status_code=200 if able else 503)

    async def list_workers(self) -> dict[str, Any]:
        workers = [backend.as_json() for backend in self._pool.all()]
        return {"weight_version": self._pool.current, "workers": workers}

    async def add_worker(self, worker: NewWorker, request: Request) -> dict[str, Any]:
        backend = self._pool.add(worker.url)
        await probe(self._pool, request.state.client, backend, self._probe_timeout_seconds)
        return backend.as_json()

    async def remove_worker(self, worker_id: str) -> dict[str, Any]:
        return self._pool.remove(worker_id).as_json()

    async def set_weight_version(self, current: CurrentVersion, request: Request) -> dict[str, Any]:
        """Set what is current and look at once who holds it, so that the answer says who serves from now on."""
        self._pool.require(current.weight_version)
        await probe_all(self._pool, request.state.client, self._probe_timeout_seconds)
        return await self.list_workers()

    async def ask_all(self, request: Request) -> JSONResponse:
        """POST the same body to every worker: 200 when all of them agreed, else 502, with each one's answer."""
        body = await request.body()
        content_type = request.headers.get("content-type", "application/json")
        asked = (
            _ask(request.state.client, backend, request.url.path, body, content_type, self._timeout_seconds)
            for backend in self._pool.all()
        )
        answers = await asyncio.gather(*asked)
        agreed = all(answer.get("status", 500) < 400 for answer in answers)
        return JSONResponse({"workers": answers}, status_code=(200 if agreed else 502) if answers else 503)


async def _ask(
    client: aiohttp.ClientSession, backend: Backend, path: str, body: bytes, content_type: str, timeout_seconds: float
) -> dict[str, Any]:
    who = {"id": backend.id, "url": backend.url}
    try:
        async with asyncio.timeout(timeout_seconds):
            async with client.post(f"{backend.url}{path}", data=body, headers={"Content-Type": content_type}) as answer:
                text = (await answer.read()).decode(errors="replace")
    except TimeoutError:
        return {**who, "error": f"no answer within {timeout_seconds:g} s"}
    except aiohttp.ClientError as error:
        return {**who, "error": describe(error)}
    return {**who, "status": answer.status, "answer": _json_or_text(text)}


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
