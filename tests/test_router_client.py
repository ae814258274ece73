"""HttpGenerate against a server on loopback that answers as told."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from milepost.engines.protocols import Completion, GenerateRequest, WeightVersion
from milepost.router.client import (
    GenerationFailed,
    GenerationStopped,
    HttpGenerate,
    RequestRefused,
    open_client,
)
from milepost.router.completions import parse_completion

REQUEST = GenerateRequest("000000-0-0000-000", [1, 2], {"max_new_tokens": 2, "temperature": 1.0})

Answer = Callable[[web.Request], Awaitable[web.Response]]


def answer_of(**changes: Any) -> dict[str, Any]:
    meta: dict[str, Any] = {
        "finish_reason": {"type": "length", "length": 2},
        "output_token_logprobs": [[-0.5, 7, None], [-1.25, 8, None]],
        "weight_version": "1-bb",
    }
    return {"text": "ab", "output_ids": [7, 8], "meta_info": {**meta, **changes}}


def generate(answer: Answer, *, timeout_seconds: float = 20.0, retries: int = 3) -> Completion:
    async def ask() -> Completion:
        app = web.Application()
        app.router.add_post("/{path}", answer)
        async with TestServer(app) as server, open_client(4) as client:
            url = str(server.make_url("")).rstrip("/")
            return await HttpGenerate(url, client, timeout_seconds=timeout_seconds, retries=retries)(REQUEST)

    return asyncio.run(ask())


def scripted(*steps: tuple[int, Any] | None) -> tuple[Answer, list[Any]]:
    """A server that takes one step a request, status and JSON or text, None hanging up; and the bodies it saw."""
    seen: list[Any] = []
    remaining = list(steps)

    async def answer(request: web.Request) -> web.Response:
        seen.append(await request.json())
        step = remaining.pop(0)
        if step is None:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        status, body = step
        return web.Response(status=status, text=body if isinstance(body, str) else json.dumps(body))

    return answer, seen


def test_a_request_is_sglangs_and_its_answer_becomes_a_completion() -> None:
    answer, seen = scripted((200, answer_of(weight_version_first="0-aa")))
    found = generate(answer)
    assert seen[0] == {
        "rid": REQUEST.sample_id,
        "input_ids": [1, 2],
        "sampling_params": {"max_new_tokens": 2, "temperature": 1.0},
        "return_logprob": True,
    }
    versions = WeightVersion(0, "aa"), WeightVersion(1, "bb")
    assert found == Completion("ab", [7, 8], [-0.5, -1.25], "length", *versions)


def test_what_a_completion_cost_the_engine_is_summed_up() -> None:
    async def ask() -> dict[str, float]:
        answer, _ = scripted((500, "busy"), (200, answer_of(prompt_tokens=2, cached_tokens=1)))
        app = web.Application()
        app.router.add_post("/{path}", answer)
        async with TestServer(app) as server, open_client(4) as client:
            asked = HttpGenerate(str(server.make_url("")).rstrip("/"), client, timeout_seconds=20)
            await asked(REQUEST)
            return asked.work.sums()

    assert asyncio.run(ask()) == {"prompt_tokens": 2, "cached_tokens": 1, "samples": 1}


def test_samples_of_a_group_have_one_routing_key() -> None:
    seen: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append(request.headers["X-SMG-Routing-Key"])
        return web.json_response(answer_of())

    generate(answer)
    assert seen == ["000000-0-0000"]


def test_one_version_is_first_and_last_when_weights_did_not_change() -> None:
    found = parse_completion("s", answer_of())
    assert found.weight_version_first == found.weight_version_last == WeightVersion(1, "bb")


def test_a_refused_request_is_asked_once_and_says_what_the_server_said() -> None:
    answer, seen = scripted((400, {"error": {"message": "the prompt is too long"}}))
    with pytest.raises(RequestRefused, match=r"'000000-0-0000-000' was refused .*: 400 the prompt is too long"):
        generate(answer)
    assert len(seen) == 1


def test_a_server_error_and_a_broken_connection_are_tried_again() -> None:
    answer, seen = scripted((503, "busy"), None, (200, answer_of()))
    assert generate(answer).output_ids == [7, 8]
    names = [REQUEST.sample_id, f"{REQUEST.sample_id}~1", f"{REQUEST.sample_id}~2"]
    assert [body["rid"] for body in seen] == names  # an engine refuses the name of a request that it still works on


def test_when_every_attempt_fails_the_last_problem_is_told() -> None:
    answer, _ = scripted((502, "first"), (500, {"message": "broken"}))
    with pytest.raises(GenerationFailed, match="after 2 attempts: 500 broken"):
        generate(answer, retries=1)


def test_a_server_that_cannot_serve_now_is_asked_until_it_can() -> None:
    answer, seen = scripted(*[(503, "no worker can serve now")] * 4, (200, answer_of()))
    assert generate(answer, retries=0).output_ids
    assert len(seen) == 5


def test_the_deadline_of_a_request_names_what_stood_in_its_way() -> None:
    answer, _ = scripted(*[(503, "no worker can serve now")] * 50)
    with pytest.raises(TimeoutError, match="within 0.5 s and was aborted: 503 no worker can serve now"):
        generate(answer, timeout_seconds=0.5)


def test_a_request_past_its_deadline_is_aborted_in_the_engine() -> None:
    aborted: list[Any] = []

    async def answer(request: web.Request) -> web.Response:
        if request.path == "/generate":
            await asyncio.sleep(60)
        aborted.append((request.path, await request.json()))
        return web.Response()

    with pytest.raises(TimeoutError, match=r"no answer within 0.05 s and was aborted"):
        generate(answer, timeout_seconds=0.05)
    assert aborted == [("/abort_request", {"rid": REQUEST.sample_id})]


@pytest.mark.parametrize("hears", [True, False])
def test_a_stop_aborts_what_runs_and_keeps_what_it_has_come_to(hears: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("milepost.router.client.ABORT_TIMEOUT_SECONDS", 0.2)
    seen: list[str] = []

    async def ask() -> Completion:
        stop, aborted = asyncio.Event(), asyncio.Event()

        async def answer(request: web.Request) -> web.Response:
            seen.append(request.path)
            if request.path == "/abort_request":
                aborted.set()
                return web.Response()
            stop.set()
            await (aborted.wait() if hears else asyncio.Event().wait())
            return web.json_response(answer_of(finish_reason={"type": "abort"}))

        app = web.Application()
        app.router.add_post("/{path}", answer)
        async with TestServer(app) as server, open_client(4) as client:
            url = str(server.make_url("")).rstrip("/")
            return await HttpGenerate(url, client, timeout_seconds=20, stop=stop)(REQUEST)

    if hears:
        assert asyncio.run(ask()).output_ids == [7, 8]
    else:
        with pytest.raises(GenerationStopped):
            asyncio.run(ask())
    assert seen == ["/generate", "/abort_request"]


def test_back_off_stays_inside_the_deadline() -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=500 if request.path == "/generate" else 404)

    with pytest.raises(TimeoutError, match="no answer within"):
        generate(answer, timeout_seconds=0.3, retries=10_000)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"output_token_logprobs": [[-0.5, 7, None]]}, "2 tokens came with 1 log-prob"),
        ({"output_token_logprobs": [[-0.5, 7, None], [-0.5, 9, None]]}, "token 1 is 8, its log-probability is of 9"),
        ({"output_token_logprobs": [[-0.5, 7, None], [None, 8, None]]}, "token 1 has the log-probability None"),
        ({"output_token_logprobs": [[float("nan"), 7, None], [-1.0, 8, None]]}, "token 0 has the log-probability nan"),
        ({"output_token_logprobs": [[float("-inf"), 7, None], [-1.0, 8, None]]}, "log-probability -inf"),
        ({"output_token_logprobs": None}, "is not SGLang's"),
        ({"weight_version": "default"}, "'default' is not a weight version"),
        ({"finish_reason": {"type": "tired"}}, "finish reason 'tired'"),
        ({"finish_reason": None}, "is not SGLang's"),
    ],
)
def test_an_answer_that_is_not_sound_names_the_sample_and_the_fault(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"sample 'me': .*{message}"):
        parse_completion("me", answer_of(**changes))


@pytest.mark.parametrize(
    "answer", [{**answer_of(), "text": None}, [], "text", None, {}, {"meta_info": {}}, {"meta_info": [1]}]
)
def test_an_answer_of_another_shape_names_the_sample(answer: Any) -> None:
    with pytest.raises(ValueError, match="sample 'me': the answer"):
        parse_completion("me", answer)


def test_an_answer_that_is_not_json_is_an_error_and_not_retried() -> None:
    answer, seen = scripted((200, "<html>"))
    with pytest.raises(ValueError, match="the answer is not JSON: '<html>'"):
        generate(answer)
    assert len(seen) == 1


@pytest.mark.parametrize("logprobs", [{}, {"output_token_logprobs": []}])
def test_a_sample_aborted_before_its_first_token_is_a_completion(logprobs: dict[str, Any]) -> None:
    meta = {"finish_reason": {"type": "abort"}, "weight_version": "0-a", **logprobs}
    found = parse_completion("s", {"text": "", "output_ids": [], "meta_info": meta})
    assert (found.finish_reason, found.output_ids, found.logprobs) == ("abort", [], [])
