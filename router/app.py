"""The router: one URL in front of many rollout engines. The application is composed from its arguments.

Its lifespan opens the client, probes every backend before the first request, and goes on probing.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence

import aiohttp
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.routing import Route
from starlette.types import Lifespan

from milepost.router.access import TokenGuard
from milepost.router.admin import Admin
from milepost.router.backends import BackendPool, BadWorkerUrl, Policy, UnknownWorker
from milepost.router.forward import Forward
from milepost.router.health import keep_probing, probe_all
from milepost.router.policies import get_policy, least_loaded

# uvicorn, in front of the engines, drops idle connections after 5 s; leaving earlier avoids sending into a closing one.
KEEPALIVE_SECONDS = 4.0


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


def create_app(
    pool: BackendPool,
    client: Callable[[], aiohttp.ClientSession] = open_client,
    *,
    policy: Policy = least_loaded,
    token: str | None = None,
    probe_seconds: float = 2.0,
    probe_timeout_seconds: float = 5.0,
    request_timeout_seconds: float = 600.0,
    resends: int = 2,
) -> FastAPI:
    """Build the router over `pool`. `client` opens what talks to the engines; the application closes it."""
    _check(probe_seconds, probe_timeout_seconds, request_timeout_seconds, resends)
    lifespan = _lifespan(pool, client, every_seconds=probe_seconds, timeout_seconds=probe_timeout_seconds)
    # An engine's own documentation stays reachable, so the router serves none.
    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    admin = Admin(pool, probe_timeout_seconds=probe_timeout_seconds, timeout_seconds=request_timeout_seconds)
    forward = Forward(pool, policy=policy, resends=resends, timeout_seconds=request_timeout_seconds)
    app.include_router(admin.routes())
    app.router.routes.append(Route("/{path:path}", forward))
    for error, status in ((RequestValidationError, 400), (BadWorkerUrl, 400), (UnknownWorker, 404)):
        app.add_exception_handler(error, _answer_with(status))
    if token is not None:
        app.add_middleware(TokenGuard, token=token)
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


def _check(probe_seconds: float, probe_timeout_seconds: float, request_timeout_seconds: float, resends: int) -> None:
    times = {
        "probe_seconds": probe_seconds,
        "probe_timeout_seconds": probe_timeout_seconds,
        "request_timeout_seconds": request_timeout_seconds,
    }
    for name, value in times.items():
        if not value > 0:
            raise ValueError(f"{name} is {value}, it must be more than 0")
    if resends < 0:
        raise ValueError(f"resends is {resends}, it must be at least 0")


def build_app(
    workers: Sequence[str] = (),
    *,
    policy: str = "least_loaded",
    token: str | None = None,
    probe_seconds: float = 2.0,
    probe_timeout_seconds: float = 5.0,
    request_timeout_seconds: float = 600.0,
    resends: int = 2,
) -> FastAPI:
    """The router as a factory with JSON arguments: `milepost.router.app:build_app`."""
    return create_app(
        BackendPool(workers),
        policy=get_policy(policy),
        token=token,
        probe_seconds=probe_seconds,
        probe_timeout_seconds=probe_timeout_seconds,
        request_timeout_seconds=request_timeout_seconds,
        resends=resends,
    )


def _answer_with(status: int) -> Callable[[Request, Exception], JSONResponse]:
    def answer(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"error": {"message": _sentence(error), "code": status}}, status_code=status)

    return answer


def _sentence(error: Exception) -> str:
    if isinstance(error, RequestValidationError):
        return "; ".join(f"{'.'.join(map(str, part['loc']))}: {part['msg']}" for part in error.errors())
    return str(error)
