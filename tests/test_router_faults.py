"""The router when engines hang, flap, come back with old weights or tear answers off, and what it says of itself."""

import asyncio
import contextlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from milepost.router.app import build_app

from .test_router import TOKEN, Engine, TornResponse, dying_server, eventually, route, serve, states

pytestmark = pytest.mark.slow

Running = list[tuple[Engine, str]]


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    first, second = Engine("first"), Engine("second")
    with serve(first.app()) as first_url, serve(second.app()) as second_url:
        yield [(first, first_url), (second, second_url)]


@pytest.fixture
def engines(running: Running) -> Running:
    for engine, _ in running:
        engine.version, engine.well = "0-aa", True
        engine.seen.clear()
    return running


def metric(client: httpx.Client, name: str, **labels: str) -> float:
    """The sum of a metric over all its series that have these labels."""
    lines = re.findall(rf"^{name}(?:\{{(.*)\}})? (\S+)$", client.get("/metrics").text, re.MULTILINE)
    chosen = [float(value) for text, value in lines if all(f'{k}="{v}"' in text for k, v in labels.items())]
    return sum(chosen)


def test_a_body_that_is_sent_in_pieces_arrives_in_pieces(engines: Running) -> None:
    came: list[tuple[float, bytes]] = []

    async def pieces(request: Request) -> Response:
        async for piece in request.stream():
            if piece:
                came.append((time.monotonic(), piece))
        return JSONResponse({"length": request.headers.get("content-length")})

    def slowly() -> Iterator[bytes]:
        for number in range(3):
            yield f"piece {number};".encode()
            time.sleep(0.2)

    app = Starlette(routes=[Route("/health", Response()), Route("/pieces", pieces, methods=["POST"])])
    with serve(app) as url, route(url) as client:
        known = client.post("/pieces", content=slowly(), headers={"Content-Length": "24"}).json()
        assert b"".join(piece for _, piece in came) == b"piece 0;piece 1;piece 2;" and known == {"length": "24"}
        assert came[-1][0] - came[0][0] > 0.3
        assert client.post("/pieces", content=slowly()).json() == {"length": None}


def test_a_body_over_the_limit_is_refused_and_no_engine_sees_it_whole(engines: Running) -> None:
    with route(engines[0][1], limit_bytes=1000) as client:
        answer = client.post("/generate", content=b"x" * 1001)
        in_pieces = client.post("/generate", content=iter([b"x" * 600] * 3))
        assert client.post("/generate", content=b"x" * 1000).status_code == 200
        assert states(client)[engines[0][1]] == "healthy"
    assert [found.status_code for found in (answer, in_pieces)] == [413, 413]
    assert "more than 1000 bytes" in answer.json()["error"]["message"] and len(engines[0][0].seen) == 1


def test_an_answer_that_breaks_off_is_asked_for_again_when_the_request_is_marked_idempotent(engines: Running) -> None:
    torn = Starlette(routes=[Route("/health", Response()), Route("/echo", lambda request: TornResponse())])
    with serve(torn) as torn_url, route(torn_url, engines[0][1], probe_seconds=60) as client:
        headers = {"Idempotency-Key": "1"}
        names = [client.get("/echo", headers=headers).json()["engine"] for _ in range(3)]
        eventually(lambda: metric(client, "milepost_router_resends_total", worker=torn_url) == 1)
        assert metric(client, "milepost_router_evictions_total", worker=torn_url) == 1
    assert names == ["first"] * 3


def test_requests_past_the_cap_wait_in_line_and_too_long_a_wait_is_503_with_retry_after() -> None:
    most = running = 0

    async def slow(request: Request) -> Response:
        nonlocal most, running
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.05)
        running -= 1
        return Response()

    app = Starlette(routes=[Route("/health", Response()), Route("/generate", slow, methods=["POST"])])
    with serve(app) as url, ThreadPoolExecutor(8) as threads:
        with route(url, max_in_flight=2) as client:
            found = list(threads.map(lambda _: client.post("/generate").status_code, range(16)))
            assert found == [200] * 16 and most == 2
        with route(url, max_in_flight=1, queue_seconds=0.02) as client:
            answers = list(threads.map(lambda _: client.post("/generate"), range(8)))
    late = [answer for answer in answers if answer.status_code == 503]
    assert late and all(answer.headers["retry-after"] == "1" for answer in late)
    assert "no worker had a free place within 0.02 s" in late[0].json()["error"]["message"]


def test_a_removed_worker_finishes_what_it_has_and_gets_nothing_more(engines: Running) -> None:
    async def slow(request: Request) -> Response:
        await asyncio.sleep(0.5)
        return JSONResponse({"engine": "slow"})

    app = Starlette(routes=[Route("/health", Response()), Route("/generate", slow, methods=["POST"])])
    with serve(app) as url, route(url) as client, ThreadPoolExecutor(2) as threads:
        asked = threads.submit(client.post, "/generate")
        eventually(lambda: client.get("/workers").json()["workers"][0]["in_flight"] == 1)
        client.post("/workers", json={"url": engines[0][1]})
        worker = next(found for found in client.get("/workers").json()["workers"] if found["url"] == url)
        removed = threads.submit(client.delete, f"/workers/{worker['id']}")
        eventually(lambda: states(client).get(url) == "draining")
        assert client.post("/generate").json()["engine"] == "first" and not asked.done()
        assert removed.result().json()["in_flight"] == 0 and asked.result().json() == {"engine": "slow"}
        assert list(states(client)) == [engines[0][1]]


def test_workers_come_and_go_in_miles_words_too(engines: Running) -> None:
    (_, first), (_, second) = engines
    with route() as client:
        client.post("/add_worker", params={"url": first})
        assert client.post("/add_worker", json={"worker_url": second}).json() == {"urls": [first, second]}
        assert client.get("/list_workers").json() == {"urls": [first, second]}
        assert client.post("/remove_worker", json={"url": first + "/"}).json() == {"urls": [second]}
        nameless = client.post("/add_worker")
    assert nameless.status_code == 400 and "give url or worker_url" in nameless.json()["error"]["message"]


def test_an_engine_that_restarts_with_old_weights_serves_again_only_with_the_current_ones(engines: Running) -> None:
    engine, url = engines[0]
    with route(url, probe_seconds=0.05) as client:
        client.post("/weight_version", json={"weight_version": "0-aa"})
        engine.well, engine.version = False, "9-old"
        eventually(lambda: states(client)[url] == "unhealthy")
        engine.well = True
        eventually(lambda: states(client)[url] == "stale")
        assert client.post("/generate", json={}).status_code == 503
        engine.version = "0-aa"
        eventually(lambda: states(client)[url] == "healthy")


def test_a_request_gets_the_weights_that_it_insists_on_or_is_told_who_holds_which(engines: Running) -> None:
    (first, first_url), (second, second_url) = engines
    first.version, second.version = "3-aa", "4-bb"
    with route(first_url, second_url) as client:
        exact = {"X-Milepost-Weight-Version": "3-aa"}
        assert {client.post("/generate", headers=exact).json()["engine"] for _ in range(4)} == {"first"}
        least = {"X-Milepost-Min-Weight-Version": "4"}
        assert {client.post("/generate", headers=least).json()["engine"] for _ in range(4)} == {"second"}
        none = client.post("/generate", headers={"X-Milepost-Min-Weight-Version": "5"})
        odd = client.post("/generate", headers={"X-Milepost-Min-Weight-Version": "x"})
    assert none.status_code == 503 and f"{first_url} holds 3-aa" in none.json()["error"]["message"]
    assert odd.status_code == 400


def test_a_session_stays_at_its_engine(engines: Running) -> None:
    with route(*(url for _, url in engines), policy="sticky") as client:
        found = [
            {client.post("/generate", headers={"X-SMG-Routing-Key": f"s{n}"}).json()["engine"] for _ in range(3)}
            for n in range(4)
        ]
    assert [len(names) for names in found] == [1] * 4 and len(set.union(*found)) == 2


def test_prompts_that_begin_alike_go_to_one_engine(engines: Running) -> None:
    with route(*(url for _, url in engines), policy="cache_aware") as client:
        asked = [{"input_ids": [start] * 100 + list(range(n))} for n in range(3) for start in (1, 2)]
        names = [client.post("/generate", json=body).json()["engine"] for body in asked]
    assert names[::2] == names[:1] * 3 and names[1::2] == names[1:2] * 3 and names[0] != names[1]


def test_the_router_counts_requests_times_tokens_and_what_runs(engines: Running) -> None:
    async def answer(request: Request) -> Response:
        async def events() -> Any:
            for number in range(1, 4):
                yield f'data: {{"meta_info": {{"prompt_tokens": 7, "completion_tokens": {number}}}}}\n\n'.encode()

        return StreamingResponse(events(), media_type="text/event-stream")

    app = Starlette(routes=[Route("/health", Response()), Route("/generate", answer, methods=["POST"])])
    with serve(app) as url, route(url) as client:
        for _ in range(2):
            client.post("/generate", json={})
        name = "milepost_router_"  # counted when an answer has ended, which its client may know first
        eventually(lambda: metric(client, f"{name}requests_total", worker=url, status="200") == 2)
        assert metric(client, f"{name}tokens_total", kind="completion") == 6
        assert metric(client, f"{name}tokens_total", kind="prompt") == 14
        assert metric(client, f"{name}request_seconds_count", worker=url) == 2
        assert metric(client, f"{name}in_flight", worker=url) == 0 and metric(client, f"{name}worker_up") == 1


def test_a_request_leaves_one_line_with_sample_worker_and_weights(
    engines: Running, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "milepost.router.access_log"), route(engines[0][1]) as client:
        answer = client.post("/generate", json={"rid": "g-1/3"}, headers={"X-Request-Id": "mine"})
        unnamed = client.post("/generate", json={})
        eventually(lambda: sum(record.name == "milepost.router.access_log" for record in caplog.records) == 2)
    lines = [json.loads(r.message) for r in caplog.records if r.name == "milepost.router.access_log"]
    assert answer.headers["x-request-id"] == "mine" and len(unnamed.headers["x-request-id"]) == 32
    assert (lines[0]["sample"], lines[0]["worker"], lines[0]["weight_version"]) == ("g-1/3", engines[0][1], "0-aa")
    assert (lines[0]["request_id"], lines[0]["status"], "sample" in lines[1]) == ("mine", 200, False)


def test_data_can_be_guarded_too_and_health_stays_open(engines: Running) -> None:
    with route(engines[0][1], token=TOKEN, guards_data=True) as client:
        assert client.post("/generate", json={}).status_code == 401
        assert client.get("/metrics").status_code == 401 and client.get("/ready").status_code == 200
        answer = client.post("/generate", json={}, headers={"Authorization": f"Bearer {TOKEN}"})
    assert answer.status_code == 200 and "authorization" not in dict(answer.json()["headers"])


def test_no_header_and_no_query_names_an_engine(engines: Running) -> None:
    (_, first), (_, second) = engines
    with route(first, token=TOKEN) as client:
        headers = {"X-Worker-Url": second, "X-SMG-Target-Worker": second}
        assert client.post(f"/generate?url={second}&worker_url={second}", headers=headers).json()["engine"] == "first"
        assert client.post("/add_worker", params={"url": second}).status_code == 401
        assert list(states_with(client)) == [first]


def states_with(client: httpx.Client) -> dict[str, str]:
    answer = client.get("/workers", headers={"Authorization": f"Bearer {TOKEN}"}).json()
    return {worker["url"]: worker["state"] for worker in answer["workers"]}


def test_openais_client_works_through_it() -> None:
    async def chat(request: Request) -> Response:
        body = await request.json()
        text = body["messages"][0]["content"].upper()
        if body.get("stream"):

            async def events() -> Any:
                for letter in text:
                    chunk = {"choices": [{"index": 0, "delta": {"content": letter}}], "object": "chat.completion.chunk"}
                    yield f"data: {json.dumps(chunk | {'id': '1', 'created': 0, 'model': 'm'})}\n\n".encode()
                yield b"data: [DONE]\n\n"

            return StreamingResponse(events(), media_type="text/event-stream")
        message = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
        return JSONResponse({"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [message]})

    app = Starlette(routes=[Route("/health", Response()), Route("/v1/chat/completions", chat, methods=["POST"])])
    with serve(app) as url, serve(build_app([url])) as router:
        client = openai.OpenAI(base_url=f"{router}/v1", api_key="any", max_retries=0)
        asked: Any = {"model": "m", "messages": [{"role": "user", "content": "abc"}]}
        whole = client.chat.completions.create(**asked)
        pieces = [chunk.choices[0].delta.content for chunk in client.chat.completions.create(**asked, stream=True)]
        client.close()
    assert whole.choices[0].message.content == "ABC" and pieces == ["A", "B", "C"]


def test_no_request_fails_while_engines_die_and_come_back_in_turn() -> None:
    stop, codes = threading.Event(), []

    def ask(client: httpx.Client) -> None:
        while not stop.is_set():
            codes.append(client.post("/generate", json={}).status_code)

    with contextlib.ExitStack() as stack:
        servers = [contextlib.ExitStack() for _ in range(2)]
        urls = [server.enter_context(serve(Engine(str(n)).app())) for n, server in enumerate(servers)]
        client = stack.enter_context(route(*urls, probe_seconds=0.1))
        with ThreadPoolExecutor(8) as threads:
            asking = [threads.submit(ask, client) for _ in range(8)]
            for server in servers:
                time.sleep(0.5)
                server.close()
                time.sleep(0.5)
                url = server.enter_context(serve(Engine("again").app()))
                client.post("/workers", json={"url": url})
            stop.set()
            for done in asking:
                done.result()
        for server in servers:
            server.close()
    assert len(codes) > 50 and set(codes) == {200}


def test_a_reset_connection_is_counted_with_its_reason_and_the_request_is_answered(engines: Running) -> None:
    with dying_server() as dying, route(dying, engines[0][1], probe_seconds=60) as client:
        assert [client.post("/generate", json={}).status_code for _ in range(3)] == [200] * 3
        reason = {"worker": dying, "reason": "ServerDisconnectedError"}
        eventually(lambda: metric(client, "milepost_router_resends_total", **reason) == 1)


def router_process(*words: str, **environment: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", "from milepost.flows.cli import main; main()", "router", *words]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}
    )


def test_a_router_of_its_own_serves_and_on_sigterm_finishes_what_is_in_flight(tmp_path: Path) -> None:
    async def slow(request: Request) -> Response:
        await asyncio.sleep(0.7)
        return JSONResponse({"text": "done"})

    app = Starlette(routes=[Route("/health", Response()), Route("/generate", slow, methods=["POST"])])
    with serve(app) as url, ThreadPoolExecutor(1) as threads:
        process = router_process("--worker", url, "--port", "0", "--policy", "cache_aware")
        assert process.stdout is not None
        said = process.stdout.readline()
        at = re.search(r"http://127\.0\.0\.1:\d+", said)
        assert at is not None and "policy cache_aware, 1 workers" in said
        asked = threads.submit(httpx.post, f"{at[0]}/generate", json={"rid": "r"}, trust_env=False)
        eventually(lambda: httpx.get(f"{at[0]}/workers", trust_env=False).json()["workers"][0]["in_flight"] == 1)
        process.send_signal(signal.SIGTERM)
        assert asked.result().json() == {"text": "done"}
        rest, _ = process.communicate(timeout=20)
    assert json.loads(rest.splitlines()[0])["sample"] == "r"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--host", "0.0.0.0"], "--host 0.0.0.0 lets others in, who could add workers: set MILEPOST_ROUTER_TOKEN"),
        (["--guard-data"], "--guard-data needs a token"),
        (["--policy", "cache_awar"], "did you mean 'cache_aware'"),
        (["--worker", "127.0.0.1:30000"], "'127.0.0.1:30000' is not of the form"),
        (["--max-in-flight", "-1"], "max_in_flight is -1, it must be at least 0"),
    ],
)
def test_what_a_router_cannot_do_is_one_sentence(words: list[str], message: str) -> None:
    process = router_process("--port", "0", *words)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 2 and message in said and len(said.strip().splitlines()) == 1
