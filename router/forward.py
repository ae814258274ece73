"""Passing one request to a backend and its answer back, bytes untouched, as a plain ASGI application.

A request is sent again, to another backend, only while no byte of an answer has come; a client that leaves closes the
connection to the backend, which aborts the request there.
"""

import asyncio
import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import aiohttp
from multidict import CIMultiDict
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send
from yarl import URL

from milepost.router.backends import Backend, BackendPool, Policy
from milepost.router.health import describe

log = logging.getLogger(__name__)

Headers = Iterable[tuple[bytes, bytes]]

# RFC 9110 7.6.1: these belong to one connection, not to the message.
HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding"
    b" upgrade".split()
)
_REQUEST_ONLY = frozenset((b"host", b"content-length", b"expect"))  # the client library writes its own
_RESPONSE_ONLY = frozenset((b"date", b"server"))  # the server in front of the router writes its own
_NOT_ADDED = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")


def end_to_end(headers: Headers, *, without: frozenset[bytes]) -> list[tuple[bytes, bytes]]:
    """The headers that travel on: neither hop-by-hop, nor named by a Connection header, nor in `without`."""
    pairs = [(name.lower(), value) for name, value in headers]
    named = {part.strip().lower() for name, value in pairs if name == b"connection" for part in value.split(b",")}
    dropped = HOP_BY_HOP | without | named
    return [(name, value) for name, value in pairs if name not in dropped]


@dataclass(frozen=True)
class _Message:
    """A request as it will be sent, to whichever backend."""

    method: str
    target: str  # path and query, still percent-encoded
    headers: CIMultiDict[str]
    body: bytes


class Forward:
    """ASGI application that lets `pool` answer. `resends` bounds how often a request is sent again."""

    def __init__(self, pool: BackendPool, *, policy: Policy, resends: int, timeout_seconds: float) -> None:
        self._pool = pool
        self._policy = policy
        self._resends = resends
        self._timeout_seconds = timeout_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await Request(scope, receive).body()
        except ClientDisconnect:
            return
        client: aiohttp.ClientSession = scope["state"]["client"]
        exchange = asyncio.ensure_future(self._exchange(client, _message(scope, body), send))
        gone = asyncio.ensure_future(_client_left(receive))
        try:
            await asyncio.wait({exchange, gone}, return_when=asyncio.FIRST_COMPLETED)
            if exchange.done():
                exchange.result()
        finally:
            gone.cancel()
            exchange.cancel()
            await asyncio.gather(gone, exchange, return_exceptions=True)

    async def _exchange(self, client: aiohttp.ClientSession, message: _Message, send: Send) -> None:
        tried: dict[str, str] = {}
        while len(tried) <= self._resends:
            backend = self._pool.pick(self._policy, tried=tried)
            if backend is None:
                break
            with self._pool.serving(backend):
                error = await self._try(client, backend, message, send)
            if error is None:
                return
            tried[backend.id] = f"{backend.url}: {error}"
        await _send_error(send, 503, _unavailable(self._pool, tried))

    async def _try(self, client: aiohttp.ClientSession, backend: Backend, message: _Message, send: Send) -> str | None:
        """Answer from `backend`; the reason when it gave no byte of an answer and another one may be asked."""
        try:
            answer = await self._open(client, backend, message)
        except aiohttp.ConnectionTimeoutError as error:
            self._pool.failed(backend, describe(error), at_once=True)
            return describe(error)
        except TimeoutError:
            await _send_error(send, 504, f"{backend.url} did not answer within {self._timeout_seconds:g} s")
            return None
        except aiohttp.ClientConnectionError as error:
            self._pool.failed(backend, describe(error), at_once=True)
            return describe(error)
        except aiohttp.ClientError as error:
            await _send_error(send, 502, f"{backend.url} did not answer in HTTP: {describe(error)}")
            return None
        async with answer:
            await _relay(backend, answer, send)
        return None

    async def _open(self, client: aiohttp.ClientSession, backend: Backend, message: _Message) -> aiohttp.ClientResponse:
        return await client.request(
            message.method,
            URL(f"{backend.url}{message.target}", encoded=True),
            headers=message.headers,
            data=message.body or None,
            allow_redirects=False,
            skip_auto_headers=_NOT_ADDED,
            timeout=aiohttp.ClientTimeout(total=self._timeout_seconds, sock_connect=10),
        )


async def _relay(backend: Backend, answer: aiohttp.ClientResponse, send: Send) -> None:
    headers = end_to_end(answer.raw_headers, without=_RESPONSE_ONLY)
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    try:
        async for chunk in answer.content.iter_any():
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
    except (aiohttp.ClientError, TimeoutError) as error:
        # Returning without the last body event makes the server cut the connection, so the client sees the break.
        log.warning("worker %s broke off an answer: %s", backend.url, describe(error))
        return
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _message(scope: Scope, body: bytes) -> _Message:
    path = scope.get("raw_path") or scope["path"].encode()
    query = scope.get("query_string", b"")
    target = (path + b"?" + query if query else path).decode("latin-1")
    kept = end_to_end(scope["headers"], without=_REQUEST_ONLY)
    headers = CIMultiDict((name.decode("latin-1"), value.decode("latin-1")) for name, value in kept)
    return _Message(scope["method"], target, headers, body)


async def _client_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _unavailable(pool: BackendPool, tried: dict[str, str]) -> str:
    if tried:
        return f"no worker answered: {'; '.join(tried.values())}"
    states = ", ".join(f"{backend.url} is {backend.state}" for backend in pool.all())
    return f"no worker can serve now: {states or 'none is registered, POST /workers to add one'}"


async def _send_error(send: Send, status: int, message: str) -> None:
    """One sentence in the shape SGLang's and OpenAI's own errors have."""
    content: dict[str, Any] = {"error": {"message": message, "code": status}}
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
