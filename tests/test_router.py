"""The router in front of real HTTP servers: engines that answer, stream, hang, break off and die."""

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from milepost.router.access import TokenGuard, is_open
from milepost.router.app import build_app
from milepost.router.backends import BackendPool, BadWorkerUrl, UnknownWorker
from milepost.router.forward import end_to_end

pytestmark = pytest.mark.slow

TOKEN = "a-token"


@contextlib.contextmanager
def serve(app: Any) -> Iterator[str]:
    """The application on a free port of this machine, until the block ends."""
    server = uvicorn.Server(
        uvicorn.Config(app, port=0, log_level="critical", lifespan="on", timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    eventually(lambda: server.started or not thread.is_alive())
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(10)


def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.01)


@dataclass
class Engine:
    """An engine without a model: it says what it was asked, and counts what runs."""

    name: str
    version: str = "0-aa"
    well: bool = True
    running: int = 0
    seen: list[tuple[str, bytes]] = field(default_factory=list)

    def app(self) -> Starlette:
        methods = ["GET", "POST", "PUT", "DELETE"]
        return Starlette(
            routes=[
                Route("/health", self.health),
                Route("/get_model_info", self.info),
                Route("/hang", self.hang, methods=["POST"]),
                Route("/stream", self.stream, methods=["POST"]),
                Route("/endless", self.endless, methods=["POST"]),
                Route("/break_off", self.break_off),
                Route("/refuse", self.refuse, methods=["POST"]),
                Route("/{path:path}", self.echo, methods=methods),
            ]
        )

    async def health(self, request: Request) -> Response:
        return Response(status_code=200 if self.well else 503)

    async def info(self, request: Request) -> Response:
        return JSONResponse({"weight_version": self.version})

    async def echo(self, request: Request) -> Response:
        body = await request.body()
        self.seen.append((request.url.path, body))
        headers = [[name, value] for name, value in request.headers.items()]
        target = request.scope["raw_path"].decode() + "?" + request.scope["query_string"].decode()
        answer = {"engine": self.name, "method": request.method, "target": target, "headers": headers}
        return JSONResponse({**answer, "body": body.decode("latin-1")}, headers={"Keep-Alive": "7", "X-Kept": "yes"})

    async def hang(self, request: Request) -> Response:
        self.running += 1
        try:
            while not await request.is_disconnected():
                await asyncio.sleep(0.01)
        finally:
            self.running -= 1
        return Response()

    async def stream(self, request: Request) -> Response:
        async def events() -> AsyncIterator[bytes]:
            for number in range(3):
                yield f"data: {number}\n\n".encode()
                await asyncio.sleep(0.05)

        return StreamingResponse(events(), media_type="text/event-stream")

    async def endless(self, request: Request) -> Response:
        async def events() -> AsyncIterator[bytes]:
            self.running += 1
            try:
                while True:
                    yield b"data: on and on\n\n"
                    await asyncio.sleep(0.01)
            finally:
                self.running -= 1

        return StreamingResponse(events(), media_type="text/event-stream")

    async def break_off(self, request: Request) -> Response:
        self.seen.append(("/break_off", b""))
        return TornResponse()

    async def refuse(self, request: Request) -> Response:
        self.seen.append(("/refuse", b""))
        return JSONResponse({"error": {"message": "too long"}}, status_code=int(request.query_params["status"]))


class TornResponse(Response):
    """Half of an answer, then the connection is cut."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"10")]})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})


@pytest.fixture(scope="module")
def running() -> Iterator[list[tuple[Engine, str]]]:
    first, second = Engine("first"), Engine("second")
    with serve(first.app()) as first_url, serve(second.app()) as second_url:
        yield [(first, first_url), (second, second_url)]


@pytest.fixture
def engines(running: list[tuple[Engine, str]]) -> list[tuple[Engine, str]]:
    """Two engines, as new."""
    for engine, _ in running:
        engine.version, engine.well = "0-aa", True
        engine.seen.clear()
    return running


@contextlib.contextmanager
def route(*urls: str, **options: Any) -> Iterator[httpx.Client]:
    with (
        serve(build_app(urls, **options)) as url,
        httpx.Client(base_url=url, timeout=20, trust_env=False, verify=False) as client,
    ):
        yield client


@contextlib.contextmanager
def dying_server() -> Iterator[str]:
    """A server that is well when probed and closes the connection on everything else, before the first byte."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection:
                    head = connection.recv(65536)
                    if head.startswith((b"GET /health", b"GET /get_model_info")):
                        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(5)


def free_url() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


def states(client: httpx.Client) -> dict[str, str]:
    return {worker["url"]: worker["state"] for worker in client.get("/workers").json()["workers"]}


def test_any_path_and_method_reaches_an_engine_with_its_bytes_untouched(engines: list[tuple[Engine, str]]) -> None:
    body = bytes(range(256))
    with route(engines[0][1]) as client:
        answer = client.put("/v1/a%2Fb/c?x=%20&y=1&x=2", content=body, headers={"X-Mine": "1", "TE": "trailers"})
    seen = answer.json()
    assert (seen["method"], seen["target"]) == ("PUT", "/v1/a%2Fb/c?x=%20&y=1&x=2")
    assert seen["body"].encode("latin-1") == body
    assert ["x-mine", "1"] in seen["headers"] and "te" not in dict(seen["headers"])
    assert answer.headers["x-kept"] == "yes" and "keep-alive" not in answer.headers


def test_requests_spread_over_idle_engines_in_turn(engines: list[tuple[Engine, str]]) -> None:
    with route(*(url for _, url in engines)) as client:
        names = [client.post("/generate", json={}).json()["engine"] for _ in range(6)]
    assert sorted(names) == ["first"] * 3 + ["second"] * 3


def test_a_stream_arrives_piece_by_piece(engines: list[tuple[Engine, str]]) -> None:
    with route(engines[0][1]) as client, client.stream("POST", "/stream") as answer:
        pieces = list(answer.iter_raw())
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert len(pieces) >= 2 and b"".join(pieces) == b"data: 0\n\ndata: 1\n\ndata: 2\n\n"


def test_a_connection_that_dies_before_the_first_byte_is_sent_to_another_engine(
    engines: list[tuple[Engine, str]],
) -> None:
    with dying_server() as dying, route(dying, engines[0][1], probe_seconds=60) as client:
        names = [client.post("/generate", json={"rid": str(n)}).json()["engine"] for n in range(4)]
        assert states(client)[dying] == "unhealthy"
    assert names == ["first"] * 4 and len(engines[0][0].seen) == 4


def test_an_answer_that_breaks_off_is_never_asked_for_again(engines: list[tuple[Engine, str]]) -> None:
    with route(*(url for _, url in engines)) as client:
        with pytest.raises(httpx.RemoteProtocolError, match="closed connection"):
            client.get("/break_off")
    assert sum(len(engine.seen) for engine, _ in engines) == 1


@pytest.mark.parametrize("status", [400, 429, 500, 503])
def test_an_engines_own_error_is_passed_on_and_not_retried(engines: list[tuple[Engine, str]], status: int) -> None:
    with route(*(url for _, url in engines)) as client:
        answer = client.post(f"/refuse?status={status}")
    assert (answer.status_code, answer.json()) == (status, {"error": {"message": "too long"}})
    assert sum(len(engine.seen) for engine, _ in engines) == 1


def test_without_an_engine_the_answer_is_503_and_says_why() -> None:
    url = free_url()
    with route() as empty, route(url) as dead:
        nothing, refused = empty.post("/generate", json={}), dead.post("/generate", json={})
        assert (dead.get("/ready").status_code, dead.get("/health").status_code) == (503, 200)
    assert nothing.status_code == 503 and "none is registered" in nothing.json()["error"]["message"]
    assert refused.status_code == 503 and f"{url} is unhealthy" in refused.json()["error"]["message"]


def test_a_client_that_leaves_ends_the_request_in_the_engine(engines: list[tuple[Engine, str]]) -> None:
    engine, url = engines[0]
    with route(url) as client:
        with pytest.raises(httpx.ReadTimeout):
            client.post("/hang", timeout=0.5)
        eventually(lambda: engine.running == 0)
        eventually(lambda: client.get("/workers").json()["workers"][0]["in_flight"] == 0)


def test_a_client_that_leaves_a_stream_ends_it_in_the_engine(engines: list[tuple[Engine, str]]) -> None:
    engine, url = engines[0]
    with route(url) as client:
        with client.stream("POST", "/endless") as answer:
            pieces = answer.iter_raw()
            assert next(pieces).startswith(b"data: on and on")
            assert engine.running == 1
        eventually(lambda: engine.running == 0)
        eventually(lambda: client.get("/workers").json()["workers"][0]["in_flight"] == 0)


def test_an_engine_that_is_too_slow_is_given_up_with_504(engines: list[tuple[Engine, str]]) -> None:
    engine, url = engines[0]
    with route(url, request_timeout_seconds=0.3) as client:
        answer = client.post("/hang")
        assert answer.status_code == 504 and "did not answer within 0.3 s" in answer.json()["error"]["message"]
        eventually(lambda: engine.running == 0)
        assert states(client)[url] == "healthy"


def test_an_engine_serves_again_once_it_is_well(engines: list[tuple[Engine, str]]) -> None:
    engine, url = engines[0]
    with route(url, probe_seconds=0.05) as client:
        engine.well = False
        eventually(lambda: states(client)[url] == "unhealthy")
        engine.well = True
        eventually(lambda: states(client)[url] == "healthy")
        assert client.post("/generate", json={}).status_code == 200


def test_only_engines_with_the_current_weights_serve(engines: list[tuple[Engine, str]]) -> None:
    (first, first_url), (second, second_url) = engines
    with route(first_url, second_url, probe_seconds=0.05) as client:
        second.version = "1-bb"
        answer = client.post("/weight_version", json={"weight_version": "1-bb"}).json()
        assert {worker["url"]: worker["state"] for worker in answer["workers"]} == {
            first_url: "stale",
            second_url: "healthy",
        }
        assert {client.post("/generate", json={}).json()["engine"] for _ in range(4)} == {"second"}
        first.version = "1-bb"
        eventually(lambda: states(client)[first_url] == "healthy")


def test_workers_come_and_go(engines: list[tuple[Engine, str]]) -> None:
    with route() as client:
        added = client.post("/workers", json={"url": engines[0][1] + "/"})
        assert (added.status_code, added.json()["state"]) == (201, "healthy")
        assert client.post("/generate", json={}).status_code == 200
        assert client.delete(f"/workers/{added.json()['id']}").status_code == 200
        missing = client.delete("/workers/nobody")
        assert client.get("/workers").json()["workers"] == []
    assert missing.status_code == 404 and "no worker 'nobody'" in missing.json()["error"]["message"]


@pytest.mark.parametrize(
    "body", [{"url": "ftp://x"}, {"url": "127.0.0.1:1"}, {"url": "http://h:port"}, {}, {"uri": "x"}]
)
def test_a_worker_that_is_no_url_is_refused_in_one_sentence(body: dict[str, str]) -> None:
    with route() as client:
        answer = client.post("/workers", json=body)
    assert answer.status_code == 400 and "url" in answer.json()["error"]["message"]


def test_control_calls_reach_every_engine_and_each_answer_is_shown(engines: list[tuple[Engine, str]]) -> None:
    with route(*(url for _, url in engines)) as client:
        good = client.post("/abort_request", json={"rid": "a"})
        client.post("/workers", json={"url": (dead := free_url())})
        partial = client.post("/pause_generation", json={"mode": "retract"})
    assert [json.loads(worker["answer"]["body"]) for worker in good.json()["workers"]] == [{"rid": "a"}] * 2
    assert (good.status_code, partial.status_code) == (200, 502)
    assert "error" in next(worker for worker in partial.json()["workers"] if worker["url"] == dead)


def test_with_a_token_control_needs_it_and_generating_does_not(engines: list[tuple[Engine, str]]) -> None:
    bearer = {"Authorization": f"Bearer {TOKEN}"}
    with route(engines[0][1], token=TOKEN) as client:
        for path in ("/workers", "/flush_cache", "/update_weights_from_disk", "/v1/../update_weights_from_disk"):
            assert client.post(path, json={}).status_code == 401
        assert client.post("/flush_cache", json={}, headers={"Authorization": "Bearer b"}).status_code == 401
        assert client.post("/flush_cache", json={}, headers=bearer).status_code == 200
        assert client.post("/generate", json={}).status_code == 200
        passed_on = client.post("/update_weights_from_disk", json={}, headers=bearer).json()
        others = client.post("/v1/completions", json={}, headers={"Authorization": "Bearer theirs"}).json()
    assert "authorization" not in dict(passed_on["headers"])
    assert ["authorization", "Bearer theirs"] in others["headers"]


def test_no_request_fails_when_one_of_two_engines_dies() -> None:
    first, second = Engine("first"), Engine("second")

    async def ask(url: str, dies: contextlib.ExitStack) -> list[int]:
        limits = httpx.Limits(max_connections=16)
        async with httpx.AsyncClient(base_url=url, timeout=20, trust_env=False, limits=limits) as client:

            async def one(number: int) -> int:
                if number == 60:
                    await asyncio.to_thread(dies.close)
                return (await client.post("/generate", json={"rid": str(number)})).status_code

            return await asyncio.gather(*(one(number) for number in range(200)))

    with contextlib.ExitStack() as dies, serve(second.app()) as second_url:
        first_url = dies.enter_context(serve(first.app()))
        with serve(build_app([first_url, second_url])) as url:
            assert asyncio.run(ask(url, dies)) == [200] * 200


def test_a_slow_backend_leaves_rotation_after_three_failures_and_a_dead_one_at_once() -> None:
    pool = BackendPool(["http://slow:1", "http://dead:1"])
    slow, dead = pool.all()
    pool.answered(slow, "0-a")
    pool.answered(dead, "0-a")
    pool.failed(dead, "refused", at_once=True)
    pool.failed(slow, "slow", at_once=False)
    pool.failed(slow, "slow", at_once=False)
    assert [(backend.state, backend.failures) for backend in (slow, dead)] == [("healthy", 2), ("unhealthy", 1)]
    pool.failed(slow, "slow", at_once=False)
    assert pool.rotation() == []


def test_a_pool_holds_a_worker_once_and_names_an_unknown_one() -> None:
    pool = BackendPool(["http://h:1", "http://h:1/"])
    assert len(pool.all()) == 1
    with pytest.raises(UnknownWorker, match="no worker 'x'"):
        pool.remove("x")
    with pytest.raises(BadWorkerUrl, match="'h:1' is not of the form"):
        pool.add("h:1")


def test_headers_of_one_connection_do_not_travel() -> None:
    headers = [(b"Connection", b"close, X-Hop"), (b"X-Hop", b"1"), (b"Upgrade", b"h2c"), (b"X-A", b"1"), (b"X-A", b"2")]
    assert end_to_end(headers, without=frozenset()) == [(b"x-a", b"1"), (b"x-a", b"2")]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/generate", True),
        ("/v1/chat/completions", True),
        ("/v1/../release_memory_occupation", False),
        ("/generate/x", False),
        ("/flush_cache", False),
        ("/workers", False),
    ],
)
def test_what_needs_no_token_is_listed(path: str, expected: bool) -> None:
    assert is_open(path) is expected


def test_an_empty_token_is_refused() -> None:
    with pytest.raises(ValueError, match="token is empty"):
        TokenGuard(Starlette(), token="")


@pytest.mark.parametrize("option", ["probe_seconds", "probe_timeout_seconds", "request_timeout_seconds"])
def test_a_time_that_is_not_positive_is_refused(option: str) -> None:
    with pytest.raises(ValueError, match=f"^{option} is 0, it must be more than 0"):
        build_app(**{option: 0})
