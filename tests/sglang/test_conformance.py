"""What every rollout engine does, asked of the embedded one and of a real SGLang server in the same words."""

import itertools
import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from milepost.engines.digest import weights_digest
from milepost.engines.protocols import Completion, PauseMode, WeightSource, WeightVersion
from milepost.engines.rollout_actor import RolloutActor
from milepost.engines.rollout_start import start_rollout
from milepost.engines.sglang_flags import environment
from milepost.router.app import build_app
from milepost.router.completions import parse_completion
from milepost.storage.parameters import EnginesSection, Parameters

from ..test_router import serve

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]

PROMPT = [4, 5, 6, 7, 8, 9, 10]
LONG = 400
TEMPERATURE = 0.7

Change = Callable[[dict[str, torch.Tensor]], None]


def post(url: str, path: str, body: dict[str, Any]) -> Any:
    answer = httpx.post(f"{url}{path}", json=body, timeout=120, trust_env=False)
    answer.raise_for_status()
    return answer.json()


def complete(engine: RolloutActor, tokens: int = 20, **sampling: Any) -> Completion:
    params = {"max_new_tokens": tokens, "temperature": TEMPERATURE, "ignore_eos": True, **sampling}
    body = {"input_ids": PROMPT, "sampling_params": params, "return_logprob": True}
    return parse_completion("sample", post(engine.url(), "/generate", body))


def started(engine: RolloutActor, tokens: int = LONG) -> "Future[Completion]":
    """A completion that is being made: its first tokens are there."""
    begun = threading.Event()

    def stream() -> Completion:
        params = {"max_new_tokens": tokens, "temperature": TEMPERATURE, "ignore_eos": True}
        body = {"input_ids": PROMPT, "sampling_params": params, "return_logprob": True, "stream": True}
        told = events(engine.url(), body)
        last = next(told)
        begun.set()
        for last in told:  # noqa: B007  (the last one is meant)
            pass
        return parse_completion("sample", json.loads(last))

    pool = ThreadPoolExecutor(1)
    running = pool.submit(stream)
    pool.shutdown(wait=False)
    assert begun.wait(60)
    return running


def events(url: str, body: dict[str, Any]) -> Iterator[str]:
    """The data of each server-sent event but the last, which has to be [DONE]."""
    with httpx.stream("POST", f"{url}/generate", json=body, timeout=120, trust_env=False) as answer:
        found = ""
        for line in filter(None, answer.iter_lines()):
            found = line.removeprefix("data: ")
            if found != "[DONE]":
                yield found
    assert found == "[DONE]"


def reference_logprobs(folder: str, completion: Completion) -> torch.Tensor:
    """transformers' log-probabilities of the same tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([PROMPT + completion.output_ids])
    with torch.no_grad():
        logits = model(ids).logits[0, len(PROMPT) - 1 : -1]
    chosen = torch.tensor(completion.output_ids)[:, None]
    return torch.log_softmax(logits / TEMPERATURE, -1).gather(1, chosen)[:, 0]


def assert_made_by(folder: str, completion: Completion) -> None:
    torch.testing.assert_close(
        torch.tensor(completion.logprobs), reference_logprobs(folder, completion), atol=1e-4, rtol=0
    )


def changed(model_dir: str, folder: Path, change: Change, *, step: int) -> WeightSource:
    """A folder of changed weights as a source."""
    folder.mkdir(exist_ok=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((Path(model_dir) / name).read_bytes())
    tensors = load_file(Path(model_dir) / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return WeightSource(str(folder), WeightVersion(step, weights_digest(tensors.items())))


def shaken(tensors: dict[str, torch.Tensor]) -> None:
    generator = torch.Generator().manual_seed(1)
    for tensor in tensors.values():
        tensor += 0.05 * torch.randn(tensor.shape, generator=generator)


def load(engine: RolloutActor, source: WeightSource, *, mode: PauseMode = "retract") -> None:
    engine.pause(mode)
    try:
        assert engine.load_weights(source) == source.version
    finally:
        engine.resume()


def test_an_engine_starts_at_version_zero_with_the_digest_of_its_files(engine: RolloutActor, model_dir: str) -> None:
    version = WeightVersion(0, weights_digest(load_file(Path(model_dir) / "model.safetensors").items()))
    assert engine.weight_version() == version
    assert str(complete(engine).weight_version_first) == str(version)


def test_log_probabilities_are_those_of_the_model_at_the_temperature(engine: RolloutActor, model_dir: str) -> None:
    completion = complete(engine)
    assert completion.finish_reason == "length" and len(completion.output_ids) == 20
    assert_made_by(model_dir, completion)


def test_loaded_weights_make_the_next_tokens_and_nothing_cached_before_is_used(
    engine: RolloutActor, model_dir: str, tmp_path: Path
) -> None:
    complete(engine)
    source = changed(model_dir, tmp_path, shaken, step=3)
    load(engine, source)
    completion = complete(engine)
    assert_made_by(str(tmp_path), completion)
    assert str(engine.weight_version()) == str(completion.weight_version_first) == str(source.version)
    with pytest.raises(AssertionError, match="not close"):
        assert_made_by(model_dir, completion)


@pytest.mark.parametrize(
    ("change", "digest", "message"),
    [
        (shaken, "f" * 32, "have digest .*, expected ffff"),
        (lambda tensors: tensors.__delitem__("model.norm.weight"), "", r"missing \['model.norm.weight'\]"),
        (lambda tensors: tensors.update(more=torch.zeros(1)), "", r"unknown \['more'\]"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.zeros(3)}), "", r"has shape \(3,\)"),
    ],
)
def test_weights_that_are_not_what_they_claim_are_refused_and_the_old_ones_serve_on(
    engine: RolloutActor, model_dir: str, tmp_path: Path, change: Change, digest: str, message: str
) -> None:
    load(engine, changed(model_dir, tmp_path / "good", lambda tensors: None, step=4))
    before = engine.weight_version()
    bad = changed(model_dir, tmp_path / "bad", change, step=5)
    with pytest.raises(ValueError, match=message):
        load(engine, WeightSource(bad.uri, WeightVersion(5, digest or bad.version.digest)))
    completion = complete(engine)
    assert engine.weight_version() == before and str(completion.weight_version_last) == str(before)
    assert_made_by(model_dir, completion)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_requests_wait_while_generation_is_paused_and_then_finish(engine: RolloutActor, mode: PauseMode) -> None:
    running = started(engine)
    engine.pause(mode)
    time.sleep(1)
    assert not running.done()
    engine.resume()
    completion = running.result(60)
    assert completion.finish_reason == "length" and len(completion.logprobs) == LONG


def test_a_request_that_weights_change_under_names_every_version_that_made_it(
    engine: RolloutActor, model_dir: str, tmp_path: Path
) -> None:
    load(engine, changed(model_dir, tmp_path / "first", lambda tensors: None, step=6))
    running = started(engine)
    load(engine, changed(model_dir, tmp_path / "second", shaken, step=7))
    completion = running.result(60)
    first, last = completion.weight_version_first.step, completion.weight_version_last.step
    assert len(completion.logprobs) == LONG and last == 7
    if first == 7:  # an engine may begin such a request again
        assert_made_by(str(tmp_path / "second"), completion)
    else:
        assert first == 6


def test_pausing_with_abort_and_aborting_end_requests_with_what_they_have(engine: RolloutActor) -> None:
    for stop in (lambda: engine.pause("abort"), engine.abort):
        running = started(engine)
        stop()
        completion = running.result(60)
        engine.resume()
        assert completion.finish_reason == "abort" and len(completion.output_ids) < LONG
    assert complete(engine).finish_reason == "length"


def test_an_engine_serves_the_same_weights_after_its_memory_was_away(
    engine: RolloutActor, model_dir: str, tmp_path: Path
) -> None:
    load(engine, changed(model_dir, tmp_path, lambda tensors: None, step=8))
    for _ in range(2):
        engine.release_memory()
        engine.resume_memory()
    assert_made_by(model_dir, complete(engine))


def test_a_stream_tells_the_text_so_far_and_ends_with_done(engine: RolloutActor) -> None:
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 12, "ignore_eos": True}, "stream": True}
    texts = [json.loads(event)["text"] for event in events(engine.url(), body)]
    assert len(texts) > 1
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))


def test_a_prompt_may_fill_the_context_but_for_one_token(engine: RolloutActor) -> None:
    body = {"input_ids": [4] * 511, "sampling_params": {"max_new_tokens": 1}, "return_logprob": True}
    assert len(parse_completion("sample", post(engine.url(), "/generate", body)).output_ids) == 1


@pytest.mark.parametrize("engine", ["sglang"], indirect=True)
def test_weights_do_not_change_under_a_cache_that_cannot_be_flushed(engine: RolloutActor, model_dir: str) -> None:
    before = engine.weight_version()
    with pytest.raises(ValueError, match="pausing in_place keeps what older weights cached"):
        load(engine, WeightSource(model_dir, WeightVersion(9, "a" * 32)), mode="in_place")
    assert engine.weight_version() == before


@pytest.mark.parametrize("engine", ["sglang"], indirect=True)
def test_a_server_that_runs_already_is_driven_and_left_running(
    engine: RolloutActor, model_dir: str, tmp_path: Path
) -> None:
    engines = EnginesSection(rollout="sglang", sglang_urls=[engine.url()])
    attached = start_rollout("attached", 0, Parameters(engines=engines), model_dir)
    source = changed(model_dir, tmp_path, shaken, step=10)
    load(attached, source)
    attached.close()
    assert str(complete(engine).weight_version_last) == str(source.version)
    assert_made_by(str(tmp_path), complete(engine))


CLIENT = """
import json, sys
import sglang
from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint

@sglang.function
def ask(s):
    s += "12+3="
    s += sglang.gen("answer", max_tokens=6, temperature=0)

endpoint = RuntimeEndpoint(sys.argv[1])
endpoint.flush_cache()
whole = ask.run(backend=endpoint)["answer"]
pieces = list(ask.run(backend=endpoint, stream=True).text_iter("answer"))
print(json.dumps([whole, "".join(pieces), endpoint.get_model_name()]))
"""


@pytest.mark.parametrize("engine", ["sglang"], indirect=True)
def test_clients_of_sglang_and_openai_see_no_router(engine: RolloutActor, sglang_python: str) -> None:
    asked: Any = {"model": "m", "prompt": "12+3=", "max_tokens": 6, "temperature": 0}
    with serve(build_app([engine.url()], policy="cache_aware")) as url:
        command = [sglang_python, "-c", CLIENT, url]
        done = subprocess.run(command, env=environment(gpu=False), capture_output=True, text=True, timeout=180)
        assert done.returncode == 0, done.stderr
        whole, streamed, model = json.loads(done.stdout.splitlines()[-1])
        with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
            completion = client.completions.create(**asked).choices[0].text
            pieces = [chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True)]
        served = httpx.get(f"{engine.url()}/get_model_info", trust_env=False).json()["model_path"]
    assert (whole, streamed, model) == (completion, completion, served)
    assert "".join(pieces) == completion and len(pieces) > 1
