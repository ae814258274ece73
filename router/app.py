"""The router: one URL in front of many rollout engines. The application is composed from its arguments.

Its lifespan opens the client, probes every backend before the first request, and goes on probing.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import aiohttp
from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Lifespan, Receive, Scope, Send

from milepost.router import access_log
from milepost.router.access import TokenGuard
from milepost.router.admin import Admin
from milepost.router.backends import BackendPool, BadWorkerUrl, UnknownWorker
from milepost.router.forward import Forward
from milepost.router.health import keep_probing, probe_all
from milepost.router.line import Line
from milepost.router.metrics import RouterMetrics
from milepost.router.policies import Policy, get_policy

# uvicorn, in front of the engines, drops idle connections after 5 s; leaving earlier avoids sending into a closing one.
KEEPALIVE_SECONDS = 4.0
WORKERS_PREFIX = "/workers/"
LIMIT_BYTES = 256 * 2**20  # of a request; prompts with pictures are large


def open_client() -> aiohttp.ClientSession:
    """A client with no limit on connections that changes nothing in what it passes on. Needs a running event loop."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECONDS),
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None),
        read_bufsize=2**18,
        max_line_size=2**16,
        max_field_size=2**16,
    )


class Router:
    """ASGI application: what is the router's own goes to `admin`, everything else to `engines` without a detour."""

    def __init__(self, admin: ASGIApp, engines: ASGIApp, *, own: frozenset[str]) -> None:
        self._admin, self._engines, self._own = admin, engines, own

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        is_own = scope["type"] != "http" or path in self._own or path.startswith(WORKERS_PREFIX)
        await (self._admin if is_own else self._engines)(scope, receive, send)


def create_app(
    pool: BackendPool,
    client: Callable[[], aiohttp.ClientSession] = open_client,
    *,
    policy: Policy,
    token: str | None = None,
    guards_data: bool = False,
    probe_seconds: float = 2.0,
    probe_timeout_seconds: float = 5.0,
    request_timeout_seconds: float = 600.0,
    resends: int = 2,
    max_in_flight: int = 0,
    queue_seconds: float = 60.0,
    limit_bytes: int = LIMIT_BYTES,
) -> ASGIApp:
    """Build the router over `pool`. `client` opens what talks to the engines; the application closes it.

    With `token`, what is not generating or looking needs it, and with `guards_data` that too. `max_in_flight` bounds
    the requests at each engine (0: nothing does); others wait in a line, for `queue_seconds` at most.
    """
    times = {
        "probe_seconds": probe_seconds,
        "probe_timeout_seconds": probe_timeout_seconds,
        "request_timeout_seconds": request_timeout_seconds,
        "queue_seconds": queue_seconds,
    }
    _check(times, {"resends": resends, "max_in_flight": max_in_flight, "limit_bytes": limit_bytes})
    lifespan = _lifespan(pool, client, every_seconds=probe_seconds, timeout_seconds=probe_timeout_seconds)
    line = Line(pool, policy, max_in_flight=max_in_flight, seconds=queue_seconds)
    metrics = RouterMetrics(pool, line)
    admin = Admin(
        pool,
        policy,
        metrics,
        probe_timeout_seconds=probe_timeout_seconds,
        timeout_seconds=request_timeout_seconds,
    ).routes()
    forward = Forward(
        pool,
        line,
        metrics,
        resends=resends,
        timeout_seconds=request_timeout_seconds,
        limit_bytes=limit_bytes,
        reads_prompt=policy.reads_prompt,
    )
    own = frozenset(route.path for route in admin.routes if isinstance(route, Route))
    router = Router(_admin_app(admin, lifespan), forward, own=own)
    return router if token is None else TokenGuard(router, token=token, guards_data=guards_data)


def _admin_app(admin: APIRouter, lifespan: Lifespan[FastAPI]) -> FastAPI:
    # An engine's own documentation stays reachable, so the router serves none.
    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.include_router(admin)
    for error, status in ((RequestValidationError, 400), (BadWorkerUrl, 400), (UnknownWorker, 404)):
        app.add_exception_handler(error, _answer_with(status))
    return app


def _lifespan(
    pool: BackendPool,
    client: Callable[[], aiohttp.ClientSession],
    *,
    every_seconds: float,
    timeout_seconds: float,
) -> Lifespan[FastAPI]:
    """Every request finds the open client in its state."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[dict[str, aiohttp.ClientSession]]:
        async with client() as session:
            await probe_all(pool, session, timeout_seconds)
            probing = asyncio.create_task(
                keep_probing(pool, session, every_seconds=every_seconds, timeout_seconds=timeout_seconds)
            )
            yield {"client": session}
            probing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await probing

    return lifespan


def _check(times: dict[str, float], counts: dict[str, int]) -> None:
    for name, value in times.items():
        if not value > 0:
            raise ValueError(f"{name} is {value}, it must be more than 0")
    for name, count in counts.items():
        if count < 0:
            raise ValueError(f"{name} is {count}, it must be at least 0")


def build_app(workers: Sequence[str] = (), *, policy: str = "least_loaded", **options: Any) -> ASGIApp:
    """The router as a factory with JSON arguments, those of `create_app`: `milepost.router.app:build_app`."""
    access_log.log.setLevel(logging.DEBUG)  # of its own, as a run's processes log no details
    return create_app(BackendPool(workers), policy=get_policy(policy), **options)


def _answer_with(status: int) -> Callable[[Request, Exception], JSONResponse]:
    def answer(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"error": {"message": _sentence(error), "code": status}}, status_code=status)

    return answer


def _sentence(error: Exception) -> str:
    if isinstance(error, RequestValidationError):
        return "; ".join(f"{'.'.join(map(str, part['loc']))}: {part['msg']}" for part in error.errors())
    return str(error)
