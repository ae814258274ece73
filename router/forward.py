"""Passing one request to an engine and its answer back, bytes untouched, as a plain ASGI application.

A request is sent again, to another engine, only while no byte of an answer has gone to the client. A client that leaves
closes the connection to the engine, which aborts the request there.
"""

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from multidict import CIMultiDict
from starlette.types import Receive, Scope, Send
from yarl import URL

from milepost.router import access_log
from milepost.router.access_log import Access, sample_of
from milepost.router.asked import Asked, BadDemand, asked_of
from milepost.router.backends import Backend, BackendPool
from milepost.router.body import BodyTooLarge, ClientLeft, RequestBody
from milepost.router.health import describe
from milepost.router.line import Line, NobodyServes, WaitedTooLong
from milepost.router.metrics import RouterMetrics, TokenCount

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
REQUEST_ID = b"x-request-id"
IDEMPOTENT = b"idempotency-key"
CONNECT_SECONDS = 10.0
RETRY_AFTER_SECONDS = 1


def end_to_end(headers: Headers, *, without: frozenset[bytes]) -> list[tuple[bytes, bytes]]:
    """The headers that travel on: neither hop-by-hop, nor named by a Connection header, nor in `without`."""
    pairs = [(name.lower(), value) for name, value in headers]
    connection = [value for name, value in pairs if name == b"connection"]
    if connection:
        without = without.union(part.strip().lower() for value in connection for part in value.split(b","))
    return [pair for pair in pairs if pair[0] not in HOP_BY_HOP and pair[0] not in without]


@dataclass
class _Exchange:
    """A request as it will be sent, to whichever engine, and what has come of it. `status` is 0 until one is sent."""

    asked: Asked
    target: str  # path and query, still percent-encoded
    headers: CIMultiDict[str]
    body: RequestBody
    send: Send
    access: Access
    is_idempotent: bool
    tokens: TokenCount = field(default_factory=TokenCount)
    started: float = field(default_factory=time.perf_counter)

    async def start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.access.status = status
        known = (REQUEST_ID, self.access.request_id.encode("latin-1"))
        headers = [pair for pair in headers if pair[0] != REQUEST_ID]
        await self.send({"type": "http.response.start", "status": status, "headers": [*headers, known]})

    async def piece(self, body: bytes, *, is_last: bool = False) -> None:
        self.access.bytes_out += len(body)
        if body:
            self.tokens.read(body)
        await self.send({"type": "http.response.body", "body": body, "more_body": not is_last})

    async def refuse(self, status: int, message: str) -> None:
        """One sentence in the shape SGLang's and OpenAI's own errors have; the client may come again after a 503."""
        self.access.problem = message
        content: dict[str, Any] = {"error": {"message": message, "code": status}}
        body = json.dumps(content).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        if status == 503:
            headers.append((b"retry-after", str(RETRY_AFTER_SECONDS).encode()))
        await self.start(status, headers)
        await self.piece(body, is_last=True)


class Forward:
    """ASGI application that lets the engines in `pool` answer. `resends` bounds how often a request is sent again."""

    def __init__(
        self,
        pool: BackendPool,
        line: Line,
        metrics: RouterMetrics,
        *,
        resends: int,
        timeout_seconds: float,
        limit_bytes: int,
        reads_prompt: bool,
    ) -> None:
        self._pool, self._line, self._metrics = pool, line, metrics
        self._resends, self._timeout_seconds = resends, timeout_seconds
        self._limit_bytes, self._reads_prompt = limit_bytes, reads_prompt

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = _exchange(scope, receive, send, limit_bytes=self._limit_bytes)
        try:
            await self._read(exchange, scope["headers"])
            await self._while_wanted(scope["state"]["client"], exchange)
        except ClientLeft as error:
            exchange.access.problem = str(error)
        except BodyTooLarge as error:
            await exchange.refuse(413, str(error))
        except BadDemand as error:
            await exchange.refuse(400, str(error))
        finally:
            self._note(exchange)

    async def _read(self, exchange: _Exchange, headers: Headers) -> None:
        """As much of the body as has to be known before an engine is chosen."""
        if self._reads_prompt:
            exchange.asked = asked_of(headers, await exchange.body.whole())
        else:
            exchange.asked = asked_of(headers)
            await exchange.body.first()

    async def _while_wanted(self, client: aiohttp.ClientSession, exchange: _Exchange) -> None:
        working = asyncio.ensure_future(self._exchange(client, exchange))
        gone = asyncio.ensure_future(exchange.body.left())
        try:
            await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
            elif exchange.body.problem is not None:
                raise exchange.body.problem
            else:
                exchange.access.problem = "the client left"
        finally:
            gone.cancel()
            working.cancel()
            await asyncio.gather(gone, working, return_exceptions=True)

    async def _exchange(self, client: aiohttp.ClientSession, exchange: _Exchange) -> None:
        tried: dict[str, str] = {}
        while len(tried) <= self._resends and exchange.body.can_be_sent_again:
            try:
                async with self._line.place(exchange.asked, tried) as backend:
                    exchange.access.worker = backend.url
                    exchange.access.weight_version = backend.weight_version or ""
                    error = await self._try(client, backend, exchange)
            except NobodyServes:
                break
            except WaitedTooLong as waited:
                await exchange.refuse(503, str(waited))
                return
            if error is None:
                return
            tried[backend.id] = f"{backend.url}: {error}"
            exchange.access.resends = len(tried)
            self._metrics.sent_again(backend.url, error.partition(":")[0])
            log.warning("request %s goes to another worker: %s", exchange.access.request_id, tried[backend.id])
        await exchange.refuse(503, _unavailable(self._pool, exchange.asked, tried))

    async def _try(self, client: aiohttp.ClientSession, backend: Backend, exchange: _Exchange) -> str | None:
        """Answer from `backend`; the reason when the client has no byte of an answer and another one may be asked."""
        try:
            answer = await self._open(client, backend, exchange)
            if exchange.is_idempotent:
                async with answer:
                    await _relay_whole(answer, await answer.read(), exchange)
                return None
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, aiohttp.ConnectionTimeoutError) as error:
            if exchange.body.problem is not None:
                raise exchange.body.problem from None  # it is no fault of the engine's
            self._pool.failed(backend, describe(error), at_once=True)
            return describe(error)
        except TimeoutError:
            await exchange.refuse(504, f"{backend.url} did not answer within {self._timeout_seconds:g} s")
            return None
        except aiohttp.ClientError as error:
            await exchange.refuse(502, f"{backend.url} did not answer in HTTP: {describe(error)}")
            return None
        async with answer:
            await _relay(backend, answer, exchange)
        return None

    async def _open(
        self, client: aiohttp.ClientSession, backend: Backend, exchange: _Exchange
    ) -> aiohttp.ClientResponse:
        body = exchange.body
        data: bytes | AsyncIterator[bytes] | None = (await body.whole() or None) if body.is_complete else body.pieces()
        return await client.request(
            exchange.access.method,
            URL(f"{backend.url}{exchange.target}", encoded=True),
            headers=exchange.headers,
            data=data,
            allow_redirects=False,
            skip_auto_headers=_NOT_ADDED,
            timeout=aiohttp.ClientTimeout(total=self._timeout_seconds, sock_connect=CONNECT_SECONDS),
        )

    def _note(self, exchange: _Exchange) -> None:
        access = exchange.access
        access.seconds = round(time.perf_counter() - exchange.started, 6)
        self._metrics.answered(access.worker or "none", access.status, access.seconds, exchange.tokens)
        if access_log.log.isEnabledFor(logging.DEBUG):
            access.sample = sample_of(exchange.body.kept)
            access.write()


async def _relay_whole(answer: aiohttp.ClientResponse, body: bytes, exchange: _Exchange) -> None:
    await exchange.start(answer.status, end_to_end(answer.raw_headers, without=_RESPONSE_ONLY))
    await exchange.piece(body, is_last=True)


async def _relay(backend: Backend, answer: aiohttp.ClientResponse, exchange: _Exchange) -> None:
    await exchange.start(answer.status, end_to_end(answer.raw_headers, without=_RESPONSE_ONLY))
    try:
        async for piece in answer.content.iter_any():
            await exchange.piece(piece)
    except (aiohttp.ClientError, TimeoutError) as error:
        # Returning without the last body event makes the server cut the connection, so the client sees the break.
        exchange.access.problem = f"the answer broke off: {describe(error)}"
        log.warning("worker %s broke off an answer: %s", backend.url, describe(error))
        return
    await exchange.piece(b"", is_last=True)


def _exchange(scope: Scope, receive: Receive, send: Send, *, limit_bytes: int) -> _Exchange:
    path = scope.get("raw_path") or scope["path"].encode()
    query = scope.get("query_string", b"")
    target = (path + b"?" + query if query else path).decode("latin-1")
    given = dict(scope["headers"])
    request_id = given.get(REQUEST_ID, b"").decode("latin-1") or uuid.uuid4().hex
    kept = end_to_end(scope["headers"], without=_REQUEST_ONLY)
    headers = CIMultiDict((name.decode("latin-1"), value.decode("latin-1")) for name, value in kept)
    headers["X-Request-Id"] = request_id
    if b"content-length" in given and b"transfer-encoding" not in given:
        headers["Content-Length"] = given[b"content-length"].decode("latin-1")
    return _Exchange(
        asked=Asked(),
        target=target,
        headers=headers,
        body=RequestBody(receive, limit_bytes=limit_bytes),
        send=send,
        access=Access(request_id, scope["method"], scope["path"]),
        is_idempotent=IDEMPOTENT in given,
    )


def _unavailable(pool: BackendPool, asked: Asked, tried: dict[str, str]) -> str:
    if tried:
        return f"no worker answered: {'; '.join(tried.values())}"
    states = ", ".join(f"{backend.url} is {backend.state}" for backend in pool.all())
    if pool.rotation():
        known = ((backend.url, backend.weight_version or "unknown ones") for backend in pool.rotation())
        held = ", ".join(f"{url} holds {version}" for url, version in known)
        return f"no worker has {asked.demand}: {held}"
    return f"no worker can serve now: {states or 'none is registered, POST /workers to add one'}"
