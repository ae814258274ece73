"""The HTTP surface of the embedded engine, over a real server with a tiny real model or the fake one."""

import json
import random
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from milepost.engines.app_server import HttpServer, bind
from milepost.engines.embedded_api import build_app
from milepost.engines.embedded_backend import EmbeddedBackend
from milepost.engines.embedded_model import EmbeddedModel
from milepost.engines.fake_backend import CharacterText, FakeModel
from milepost.engines.tiny_model import write_tiny_model
from milepost.engines.tokenizer import load_tokenizer, write_character_tokenizer

pytestmark = pytest.mark.slow

CHARACTERS = "0123456789+-*/= abcdefghijklmnopqrstuvwxyz"
Serve = Callable[..., httpx.Client]


def write_model(directory: Path, seed: int) -> str:
    write_tiny_model(str(directory), vocab_size=48, hidden=32, layers=2, heads=4, kv_heads=2, seed=seed)
    write_character_tokenizer(str(directory), CHARACTERS)
    return str(directory)


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Two models of one shape with different weights."""
    root = tmp_path_factory.mktemp("models")
    return write_model(root / "first", 1), write_model(root / "second", 2)


@pytest.fixture(scope="module")
def shared(model_dirs: tuple[str, str]) -> Iterator[httpx.Client]:
    """A server over the first model, for tests that change nothing."""
    with serving(real_backend(model_dirs[0])) as client:
        yield client


class serving:
    """A server over a backend, and a client of it; both end with the block."""

    def __init__(self, backend: EmbeddedBackend) -> None:
        self.backend = backend

    def __enter__(self) -> httpx.Client:
        self.server = HttpServer(build_app(self.backend))
        limits = httpx.Limits(max_connections=100)
        self.client = httpx.Client(base_url=self.server.url, timeout=60, trust_env=False, limits=limits)
        return self.client

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.backend.scheduler.close()
        self.server.stop()


def real_backend(model_dir: str, *, max_running: int = 16) -> EmbeddedBackend:
    torch.set_num_threads(1)
    model = EmbeddedModel(model_dir, dtype="float32", context_length=512, max_rows=max_running)
    return EmbeddedBackend(model, load_tokenizer(model_dir), model_dir=model_dir, max_running_requests=max_running)


def fake_backend(**options: Any) -> EmbeddedBackend:
    return EmbeddedBackend(FakeModel(**options), CharacterText(), model_dir="", max_running_requests=16)


def generate(client: httpx.Client, input_ids: list[int] | list[list[int]], **sampling: Any) -> Any:
    body = {"input_ids": input_ids, "return_logprob": True, "sampling_params": {"ignore_eos": True, **sampling}}
    response = client.post("/generate", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def wait_for(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        time.sleep(0.005)
    raise AssertionError("the condition did not come true")


def running(client: httpx.Client) -> int:
    load = client.get("/get_load").json()[0]
    return int(load["num_reqs"] - load["num_waiting_reqs"])


def tokens_and_logprobs(answer: dict[str, Any]) -> tuple[list[int], list[float]]:
    triples = answer["meta_info"]["output_token_logprobs"]
    return [token for _, token, _ in triples], [value for value, _, _ in triples]


def test_an_answer_has_the_shape_of_sglangs(shared: httpx.Client) -> None:
    body = {"text": "1+2=", "rid": "mine", "sampling_params": {"max_new_tokens": 5, "ignore_eos": True}}
    answer = shared.post("/generate", json=body).json()
    meta = answer["meta_info"]
    assert len(answer["output_ids"]) == meta["completion_tokens"] == 5
    assert (meta["id"], meta["prompt_tokens"], meta["cached_tokens"]) == ("mine", 4, 0)
    assert meta["finish_reason"] == {"type": "length", "length": 5}
    assert meta["weight_version"].startswith("0-")
    assert "output_token_logprobs" not in meta and "weight_version_first" not in meta


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_log_probabilities_are_those_of_a_plain_forward_pass(
    shared: httpx.Client, model_dirs: tuple[str, str], temperature: float
) -> None:
    prompt = [5, 9, 30, 4]
    ids, logprobs = tokens_and_logprobs(generate(shared, prompt, temperature=temperature, max_new_tokens=60))
    model = AutoModelForCausalLM.from_pretrained(model_dirs[0], dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    wanted = torch.log_softmax(logits / (temperature or 1.0), -1)[torch.arange(len(ids)), ids]
    assert logprobs == pytest.approx(wanted.tolist(), abs=1e-4)


def test_the_same_seed_gives_the_same_tokens_in_every_mix_of_requests(shared: httpx.Client) -> None:
    source = random.Random(3)
    cases = []
    for seed in range(40):
        prompt = [source.randrange(3, 48) for _ in range(source.randint(1, 70))]
        sampling = {"sampling_seed": seed, "max_new_tokens": source.randint(1, 60), "top_p": source.choice([1, 0.9])}
        cases.append((prompt, sampling))
    alone = [generate(shared, prompt, **sampling)["output_ids"] for prompt, sampling in cases]
    for _ in range(4):
        order = source.sample(range(len(cases)), len(cases))
        with ThreadPoolExecutor(len(cases)) as pool:
            answers = list(pool.map(lambda i: generate(shared, cases[i][0], **cases[i][1])["output_ids"], order))
        assert answers == [alone[i] for i in order]


def test_a_list_of_prompts_is_answered_with_a_list_in_its_order(shared: httpx.Client) -> None:
    prompts = [[4], [5, 6], [7, 8, 9]]
    answers = generate(shared, prompts, sampling_seed=1, max_new_tokens=4)
    assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == [1, 2, 3]
    assert answers[1]["output_ids"] == generate(shared, [5, 6], sampling_seed=1, max_new_tokens=4)["output_ids"]


def test_a_seed_that_was_not_given_is_reported_and_reproduces_the_answer(shared: httpx.Client) -> None:
    first = generate(shared, [4, 5], max_new_tokens=20)
    again = generate(shared, [4, 5], max_new_tokens=20, sampling_seed=first["meta_info"]["sampling_seed"])
    assert again["output_ids"] == first["output_ids"]


def test_a_stop_token_ends_the_response_and_is_left_out_of_the_text(shared: httpx.Client) -> None:
    whole = generate(shared, [4, 5], max_new_tokens=20, sampling_seed=2)
    stop = whole["output_ids"][6]
    answer = generate(shared, [4, 5], max_new_tokens=20, sampling_seed=2, stop_token_ids=[stop])
    ids = answer["output_ids"]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert ids == whole["output_ids"][: len(ids)] and ids[-1] == stop and stop not in ids[:-1]
    assert whole["text"].startswith(answer["text"])


def test_a_stop_string_over_several_tokens_ends_the_response_and_the_text(shared: httpx.Client) -> None:
    whole = generate(shared, [4, 5], max_new_tokens=30, sampling_seed=5)["text"]
    stop = whole[10:13]
    answer = generate(shared, [4, 5], max_new_tokens=30, sampling_seed=5, stop=["not there", stop])
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert answer["text"] == whole[: whole.find(stop)]
    kept = generate(shared, [4, 5], max_new_tokens=30, sampling_seed=5, stop=stop, no_stop_trim=True)
    assert kept["text"] == whole[: whole.find(stop) + 3]


def test_a_response_ends_at_the_context_length(shared: httpx.Client) -> None:
    answer = generate(shared, [4] * 500, max_new_tokens=100)
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 12}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"input_ids": [4], "sampling_params": {"temprature": 1}}', "did you mean 'temperature'"),
        ('{"input_ids": [4], "sampling_params": {"temperature": -0.5}}', "temperature is -0.5"),
        ('{"input_ids": [48]}', "token id 48 is outside the vocabulary of 48 tokens"),
        ('{"input_ids": []}', "the prompt is empty"),
        (json.dumps({"input_ids": [4] * 512}), "the prompt has 512 tokens"),
        ("{", "the body is not JSON"),
        ("[1]", "the body is not a JSON object"),
    ],
)
def test_a_bad_request_is_answered_with_400_and_one_sentence(shared: httpx.Client, content: str, message: str) -> None:
    response = shared.post("/generate", content=content)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


def test_streamed_text_is_cumulative_and_ends_as_the_plain_answer(shared: httpx.Client) -> None:
    body = {"text": "1+", "sampling_params": {"sampling_seed": 4, "max_new_tokens": 12, "ignore_eos": True}}
    plain = shared.post("/generate", json=body).json()
    with shared.stream("POST", "/generate", json=body | {"stream": True}) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    texts = [json.loads(line)["text"] for line in lines[:-1]]
    assert texts[-1] == plain["text"]
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))


def test_health_and_information_answer(shared: httpx.Client) -> None:
    assert shared.get("/health").status_code == shared.get("/health_generate").status_code == 200
    info = shared.get("/get_model_info").json()
    assert (info["is_generation"], info["vocab_size"], info["context_length"]) == (True, 48, 512)
    assert shared.post("/flush_cache").status_code == 200


def test_a_client_that_disconnects_takes_its_request_with_it() -> None:
    with serving(fake_backend(delay_seconds=0.05)) as client:
        with pytest.raises(httpx.ReadTimeout):
            client.post("/generate", json={"input_ids": [1], "sampling_params": {"ignore_eos": True}}, timeout=0.3)
        wait_for(lambda: client.get("/get_load").json()[0]["num_reqs"] == 0)


def test_a_closed_stream_takes_its_request_with_it() -> None:
    with serving(fake_backend(delay_seconds=0.05)) as client:
        body = {"input_ids": [1], "stream": True, "sampling_params": {"ignore_eos": True}}
        with client.stream("POST", "/generate", json=body) as response:
            next(response.iter_lines())
        wait_for(lambda: client.get("/get_load").json()[0]["num_reqs"] == 0)


def test_abort_request_ends_one_request_with_what_it_has() -> None:
    with serving(fake_backend(delay_seconds=0.01)) as client, ThreadPoolExecutor(2) as pool:
        bodies = [
            {"input_ids": [1], "rid": rid, "sampling_params": {"ignore_eos": True, "max_new_tokens": 100}}
            for rid in ("one", "two")
        ]
        answers = [pool.submit(client.post, "/generate", json=body) for body in bodies]
        wait_for(lambda: running(client) == 2)
        assert client.post("/abort_request", json={"rid": "one"}).status_code == 200
        reasons = [answer.result().json()["meta_info"]["finish_reason"]["type"] for answer in answers]
        assert reasons == ["abort", "length"]
        assert client.post("/abort_request", json={}).status_code == 400


def start_long(client: httpx.Client, pool: ThreadPoolExecutor, count: int = 3) -> list[Any]:
    """Requests that are running when this returns; `.result()` is the answer."""
    started = [
        pool.submit(generate, client, [4, 5, index], sampling_seed=index, max_new_tokens=400) for index in range(count)
    ]
    wait_for(lambda: running(client) == count)
    return started


def update(client: httpx.Client, model_dir: str) -> str:
    response = client.post("/update_weights_from_disk", json={"model_path": model_dir})
    assert response.json()["success"] is True
    return str(client.get("/get_model_info").json()["weight_version"])


def test_retracted_requests_get_all_their_tokens_from_the_new_weights(model_dirs: tuple[str, str]) -> None:
    with serving(real_backend(model_dirs[0])) as client, ThreadPoolExecutor(3) as pool:
        started = start_long(client, pool)
        assert client.post("/pause_generation", json={"mode": "retract"}).json()["status"] == "ok"
        assert running(client) == 0
        version = update(client, model_dirs[1])
        client.post("/continue_generation", json={})
        for index, answer in enumerate(item.result() for item in started):
            assert answer["meta_info"]["weight_version"] == version
            assert "weight_version_first" not in answer["meta_info"]
            fresh = generate(client, [4, 5, index], sampling_seed=index, max_new_tokens=400)
            assert answer["output_ids"] == fresh["output_ids"]


def test_requests_paused_in_place_carry_both_versions(model_dirs: tuple[str, str]) -> None:
    with serving(real_backend(model_dirs[0])) as client, ThreadPoolExecutor(3) as pool:
        started = start_long(client, pool)
        client.post("/pause_generation", json={"mode": "in_place"})
        first = client.get("/get_model_info").json()["weight_version"]
        last = update(client, model_dirs[1])
        client.post("/continue_generation")
        metas = [item.result()["meta_info"] for item in started]
        assert {(meta["weight_version_first"], meta["weight_version"]) for meta in metas} == {(first, last)}


def test_pausing_with_abort_ends_requests_with_what_they_have_and_holds_new_ones() -> None:
    with serving(fake_backend(delay_seconds=0.01)) as client, ThreadPoolExecutor(4) as pool:
        started = start_long(client, pool)
        client.post("/pause_generation", json={"mode": "abort"})
        metas = [item.result()["meta_info"] for item in started]
        assert {meta["finish_reason"]["type"] for meta in metas} == {"abort"}
        assert all(meta["completion_tokens"] < 400 for meta in metas)
        held = pool.submit(generate, client, [1], max_new_tokens=2)
        wait_for(lambda: client.get("/get_load").json()[0]["num_waiting_reqs"] == 1)
        client.post("/continue_generation")
        assert len(held.result()["output_ids"]) == 2
        assert client.post("/pause_generation", json={"mode": "gently"}).status_code == 400


def test_a_prompt_that_is_read_for_several_at_once_is_cached_for_all_but_the_first(
    model_dirs: tuple[str, str],
) -> None:
    with serving(real_backend(model_dirs[0])) as client, ThreadPoolExecutor(4) as pool:
        client.post("/pause_generation", json={"mode": "in_place"})
        asked = [pool.submit(generate, client, ids, max_new_tokens=1) for ids in ([4, 5, 6, 7],) * 3 + ([4, 5],)]
        wait_for(lambda: client.get("/get_load").json()[0]["num_waiting_reqs"] == 4)
        client.post("/continue_generation")
        *same, other = (item.result()["meta_info"]["cached_tokens"] for item in asked)
        assert (sorted(same), other) == ([0, 3, 3], 0)


def test_an_update_without_a_pause_waits_for_running_requests_and_never_mixes(model_dirs: tuple[str, str]) -> None:
    with serving(real_backend(model_dirs[0])) as client, ThreadPoolExecutor(8) as pool:
        old = client.get("/get_model_info").json()["weight_version"]
        started = start_long(client, pool)
        updating = pool.submit(update, client, model_dirs[1])
        later = [pool.submit(generate, client, [7], sampling_seed=9, max_new_tokens=50) for _ in range(4)]
        new = updating.result()
        assert {item.result()["meta_info"]["weight_version"] for item in started} == {old}
        metas = [item.result()["meta_info"] for item in later]
        assert {meta["weight_version"] for meta in metas} <= {old, new}
        assert not any("weight_version_first" in meta for meta in metas)


def test_weights_that_do_not_fit_are_refused_and_nothing_changes(model_dirs: tuple[str, str], tmp_path: Path) -> None:
    write_tiny_model(str(tmp_path), vocab_size=48, hidden=16, layers=2, heads=4, kv_heads=2, seed=1)
    with serving(real_backend(model_dirs[0])) as client:
        before = (client.get("/get_model_info").json(), generate(client, [4], sampling_seed=1)["output_ids"])
        for path, message in ((str(tmp_path), "has shape"), (str(tmp_path / "none"), "holds no .safetensors")):
            response = client.post("/update_weights_from_disk", json={"model_path": path})
            assert response.status_code == 400
            assert message in response.json()["message"]
        assert before == (client.get("/get_model_info").json(), generate(client, [4], sampling_seed=1)["output_ids"])


def test_an_update_takes_any_version_name_and_checks_one_that_holds_a_digest(model_dirs: tuple[str, str]) -> None:
    with serving(real_backend(model_dirs[0])) as client:
        body = {"model_path": model_dirs[1], "weight_version": "mine"}
        assert client.post("/update_weights_from_disk", json=body).status_code == 200
        assert generate(client, [4], max_new_tokens=1)["meta_info"]["weight_version"] == "mine"
        body["weight_version"] = "3-0123456789abcdef"
        response = client.post("/update_weights_from_disk", json=body)
        assert "expected 0123456789abcdef" in response.json()["error"]["message"]


def test_releasing_memory_holds_requests_until_it_is_resumed(model_dirs: tuple[str, str]) -> None:
    with serving(real_backend(model_dirs[0])) as client, ThreadPoolExecutor(3) as pool:
        started = start_long(client, pool)
        assert client.post("/release_memory_occupation", json={}).status_code == 200
        assert running(client) == 0
        assert client.post("/resume_memory_occupation", json={}).status_code == 200
        assert all(len(item.result()["output_ids"]) == 400 for item in started)


def test_damaged_weights_abort_their_requests_and_good_ones_heal_the_engine(model_dirs: tuple[str, str]) -> None:
    backend = real_backend(model_dirs[0])
    with serving(backend) as client:
        wanted = generate(client, [4, 5], sampling_seed=1, max_new_tokens=30)["output_ids"]
        broken = backend._model._model  # type: ignore[attr-defined]
        backend.scheduler.update(lambda: torch.nn.init.constant_(broken.model.norm.weight, torch.nan), "broken")
        reason = generate(client, [4, 5])["meta_info"]["finish_reason"]
        assert reason["type"] == "abort" and "not a number" in reason["message"]
        update(client, model_dirs[0])
        assert generate(client, [4, 5], sampling_seed=1, max_new_tokens=30)["output_ids"] == wanted


def test_when_the_model_fails_requests_are_aborted_and_health_says_why() -> None:
    class Failing(FakeModel):
        def step(self) -> list[tuple[int, float] | None]:
            raise MemoryError("no room")

    backend = EmbeddedBackend(Failing(), CharacterText(), model_dir="", max_running_requests=4)
    with serving(backend) as client:
        reason = generate(client, [1])["meta_info"]["finish_reason"]
        assert reason == {"type": "abort", "message": "generation ended with MemoryError: no room"}
        assert client.get("/health").status_code == 503
        assert client.post("/generate", json={"input_ids": [1]}).status_code == 503
        assert client.post("/pause_generation", json={}).status_code == 503


def test_a_fake_answer_depends_on_prompt_seed_and_version_alone() -> None:
    with serving(fake_backend()) as client:
        first = generate(client, [1, 2], sampling_seed=5, max_new_tokens=20)
        generate(client, [[3], [4]], max_new_tokens=3)
        assert generate(client, [1, 2], sampling_seed=5, max_new_tokens=20) | {"meta_info": 0} == first | {
            "meta_info": 0
        }
        assert generate(client, [1, 2], sampling_seed=6, max_new_tokens=20)["output_ids"] != first["output_ids"]
        update(client, "elsewhere")
        assert generate(client, [1, 2], sampling_seed=5, max_new_tokens=20)["output_ids"] != first["output_ids"]


def test_only_the_fake_prompt_with_the_slow_token_is_slow() -> None:
    with serving(fake_backend(slow_token=200, slow_seconds=600.0)) as client, ThreadPoolExecutor(1) as pool:
        slow = pool.submit(generate, client, [200], max_new_tokens=1)
        wait_for(lambda: running(client) == 1)
        assert len(generate(client, [1], max_new_tokens=50)["output_ids"]) == 50
        assert running(client) == 1
        client.post("/abort_request", json={"abort_all": True})
        assert slow.result()["meta_info"]["finish_reason"]["type"] == "abort"


def test_a_port_in_use_is_refused_by_name() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"port {port} on 127.0.0.1 is in use: choose another"):
            bind("127.0.0.1", port)
