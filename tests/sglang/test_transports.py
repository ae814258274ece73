"""Weights into a real SGLang server by every transport: it then answers with the new weights' log-probabilities."""

import json
import urllib.request
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from milepost.engines.digest import weights_digest
from milepost.engines.protocols import PushReport, WeightVersion
from milepost.engines.rollout_actor import RolloutActor
from milepost.engines.weight_carriers import open_carrier
from milepost.engines.weight_exports import Exports
from milepost.engines.weight_push import push_tensors
from milepost.storage.parameters import SyncSection
from milepost.tasks.sync import load_into

pytestmark = pytest.mark.slow

PROMPT = [3, 4, 5, 6, 7, 8, 3, 4]
TOLERANCE = 1e-4
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def engine(sglang_server: RolloutActor) -> RolloutActor:
    return sglang_server


@pytest.fixture
def model_dir(wordy_model: str) -> str:
    return wordy_model


def changed(model_dir: str, seed: int) -> Tensors:
    noise = torch.Generator().manual_seed(seed)
    read = load_file(Path(model_dir, "model.safetensors"))
    return {name: tensor + 0.05 * torch.randn(tensor.shape, generator=noise) for name, tensor in read.items()}


def expected(model_dir: str, tensors: Tensors) -> list[float]:
    """What transformers says of every token of the prompt but the first."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    model.load_state_dict(tensors, strict=False)
    model.tie_weights()
    with torch.no_grad():
        logprobs = torch.log_softmax(model(torch.tensor([PROMPT])).logits[0], -1)
    return logprobs[range(len(PROMPT) - 1), PROMPT[1:]].tolist()


def served(url: str) -> tuple[list[float], str, int]:
    """The server's log-probabilities of the prompt, the version it stamps, and how many tokens it had cached."""
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}, "return_logprob": True}
    data = json.dumps(body | {"logprob_start_len": 0}).encode()
    request = urllib.request.Request(f"{url}/generate", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        meta = json.load(answer)["meta_info"]
    return [row[0] for row in meta["input_token_logprobs"]][1:], meta["weight_version"], meta["cached_tokens"]


def warm(url: str) -> None:
    """Leave the prompt in the server's cache."""
    data = json.dumps({"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}}).encode()
    request = urllib.request.Request(f"{url}/generate", data, {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=60).close()


def holds(engine: RolloutActor, model_dir: str, tensors: Tensors, version: WeightVersion) -> None:
    found, stamped, cached = served(engine.url())
    assert stamped == str(version) == str(engine.weight_version()) and cached == 0
    wanted = expected(model_dir, tensors)
    assert max(abs(one - other) for one, other in zip(found, wanted, strict=True)) < TOLERANCE


def pushed(engine: RolloutActor, tensors: Tensors, step: int, transport: str) -> PushReport:
    version = WeightVersion(step, weights_digest(tensors.items()))
    sync = SyncSection(bucket_bytes=20_000, timeout_seconds=60, checksum="full")
    carrier = open_carrier(transport)
    engine.pause("retract")
    report = push_tensors(tensors.items(), [engine.url()], version, names=tensors, sync=sync, carrier=carrier)
    carrier.close()
    if not report.failed:
        engine.resume()
    return report


@pytest.mark.parametrize("transport", ["tensor", "distributed"])
def test_what_is_pushed_is_what_the_server_computes_with(
    engine: RolloutActor, model_dir: str, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    for step in (1, 2):
        warm(engine.url())
        tensors = changed(model_dir, seed=10 * step + len(transport))
        report = pushed(engine, tensors, step, transport)
        assert report.failed == {}
        holds(engine, model_dir, tensors, report.version)


@pytest.mark.parametrize("kind", ["full", "delta"])
def test_what_is_exported_is_what_the_server_computes_with(
    engine: RolloutActor, model_dir: str, tmp_path: Path, kind: str
) -> None:
    exports = Exports(model_dir, "float32")
    for step in (1, 2, 3):
        warm(engine.url())
        tensors, uri = changed(model_dir, seed=100 * step + len(kind)), str(tmp_path / f"{step}")
        digest = exports.write(tensors.items(), uri, kind)  # type: ignore[arg-type]
        source = exports.named(uri, WeightVersion(step, digest))
        assert (source.base is None) == (kind == "full" or step == 1)
        load_into(engine, source, mode="retract")
        holds(engine, model_dir, tensors, source.version)


def test_a_server_that_was_not_sent_everything_serves_no_version_until_it_has_loaded_a_folder(
    engine: RolloutActor, model_dir: str, tmp_path: Path
) -> None:
    tensors = changed(model_dir, seed=5)
    missing = {name: tensor for name, tensor in tensors.items() if name != "model.norm.weight"}
    unknown = tensors | {"model.layers.9.input_layernorm.weight": torch.ones(32)}
    for wrong, words in ((missing, r"was sent nothing for ['model.norm.weight']"), (unknown, "has no tensor for")):
        assert words in pushed(engine, wrong, 7, "tensor").failed[engine.url()]
        assert engine.weight_version() is None
    exports = Exports(model_dir, "float32")
    digest = exports.write(tensors.items(), str(tmp_path / "full"), "full")
    load_into(engine, exports.named(str(tmp_path / "full"), WeightVersion(7, digest)), mode="retract")
    holds(engine, model_dir, tensors, WeightVersion(7, digest))
