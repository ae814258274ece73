"""A Hugging Face folder becomes a Megatron model and comes back unchanged, and both give the same log-probabilities."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from milepost.engines.digest import weights_digest
from milepost.engines.hf_export import export_folder
from milepost.engines.hf_folder import HfFolder
from milepost.engines.megatron_rank import MegatronRank
from milepost.engines.megatron_weights import Kind, join, split, weights_of
from milepost.engines.model_layout import ModelShape, Rope, read_shape
from milepost.engines.train_actors import TrainSetup
from milepost.storage.parameters import ModelSection
from milepost.storage.schema import ROLLOUTS, from_rows
from milepost.storage.tables import read_table, write_table
from milepost.storage.training import OptimizerSection, PerfSection

VOCAB, TEMPERATURE = 67, 0.7
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
MODELS: dict[str, tuple[type[PreTrainedConfig], dict[str, object]]] = {
    "llama tied": (LlamaConfig, {"tie_word_embeddings": True}),
    "llama with llama3 rope": (LlamaConfig, {"rope_parameters": LLAMA3, "head_dim": 16}),
    "llama with linear rope": (LlamaConfig, {"rope_parameters": LINEAR, "num_key_value_heads": 4}),
    "qwen2": (Qwen2Config, {}),
    "qwen2 tied": (Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, {"head_dim": 16}),
    "qwen3 tied": (Qwen3Config, {"head_dim": 16, "tie_word_embeddings": True, "num_key_value_heads": 1}),
}


def save_model(name: str, folder: Path) -> torch.nn.Module:
    kind, options = MODELS[name]
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    torch.manual_seed(1)
    config = kind(**{**sizes, "num_attention_heads": 4, "num_key_value_heads": 2, **options})
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return model.eval()


@contextmanager
def rank_of(folder: Path) -> Iterator[MegatronRank]:
    setup = TrainSetup(str(folder), ModelSection(), OptimizerSection(), PerfSection(train_threads=1), TEMPERATURE, 0)
    rank = MegatronRank(0, 1, setup)
    try:
        rank.connect(*rank.rendezvous())
        yield rank
    finally:
        rank.close()


def sample(prompt: list[int], response: list[int]) -> dict[str, object]:
    row: dict[str, object] = {name: "" for name in ROLLOUTS.names if ROLLOUTS.field(name).type == "string"}
    row |= {"step": 0, "shard": 0, "turns": 1, "seed": 0, "response_escaped": False}
    row |= {"prompt_token_ids": prompt, "response_token_ids": response}
    return row | {"loss_mask": [1] * len(response), "rollout_logprobs": [0.0] * len(response)}


def logprobs_of(model: torch.nn.Module, prompt: list[int], response: list[int]) -> torch.Tensor:
    """What transformers says of `response`."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits / TEMPERATURE, -1).gather(1, torch.tensor(response)[:, None])[:, 0]


@pytest.mark.parametrize("name", MODELS)
def test_megatron_says_what_transformers_says_and_exports_every_bit(name: str, tmp_path: Path) -> None:
    model = save_model(name, tmp_path / "model")
    torch.manual_seed(2)
    texts = [(torch.randint(VOCAB, (3,)).tolist(), torch.randint(VOCAB, (length,)).tolist()) for length in (40, 1, 7)]
    batch = write_table(str(tmp_path / "batch"), from_rows([sample(*text) for text in texts], ROLLOUTS), ROLLOUTS)
    with rank_of(tmp_path / "model") as rank:
        filled = rank.logprobs(batch, "policy", str(tmp_path / "filled"))
        source = rank.weights(str(tmp_path / "exported"), 0)
    assert filled is not None
    for found, text in zip(read_table(filled)["old_logprobs"].to_pylist(), texts, strict=True):
        torch.testing.assert_close(torch.tensor(found), logprobs_of(model, *text), atol=1e-4, rtol=0)
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert weights_digest(exported.items()) == source.version.digest
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "exported").state_dict()
    assert all(torch.equal(loaded[key], tensor) for key, tensor in model.state_dict().items())


SHAPE = ModelShape("llama", 1, 12, 24, 8, 4, 6, 13, 64, 1e-6, False, Rope(1e4))


@given(kind=st.sampled_from(["whole", "columns", "vocab", "qkv", "gate_up"]), ranks=st.sampled_from([1, 2, 4]))
def test_joining_the_slices_gives_back_the_tensors(kind: Kind, ranks: int) -> None:
    rows = {"vocab": [13], "qkv": [48, 24, 24], "gate_up": [24, 24]}.get(kind, [12])
    tensors = [torch.randn(count, 12) for count in rows]
    slices = [split(kind, tensors, SHAPE, rank=rank, ranks=ranks) for rank in range(ranks)]
    for found, wanted in zip(join(kind, slices, SHAPE), tensors, strict=True):
        assert torch.equal(found, wanted)


def test_queries_keys_and_values_are_interleaved_by_key_value_head() -> None:
    shape = replace(SHAPE, heads=4, kv_heads=2, head_dim=1)
    query, key, value = torch.tensor([0, 1, 2, 3]), torch.tensor([10, 11]), torch.tensor([20, 21])
    slices = [split("qkv", [query, key, value], shape, rank=rank, ranks=2).tolist() for rank in range(2)]
    assert slices == [[0, 1, 10, 20], [2, 3, 11, 21]]


def test_a_large_model_is_exported_in_shards_with_an_index(tmp_path: Path) -> None:
    model = save_model("llama tied", tmp_path / "model")
    tensors = list(HfFolder(str(tmp_path / "model")).named_tensors())
    digest = export_folder(
        tensors, str(tmp_path / "out"), model_dir=str(tmp_path / "model"), shard_bytes=20_000, dtype="x"
    )
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert weights_digest(HfFolder(str(tmp_path / "out")).named_tensors()) == digest
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "x"
    assert set(index["weight_map"]) == set(model.state_dict()) - {"lm_head.weight"}


def test_a_failed_export_leaves_the_folder_that_was_there(tmp_path: Path) -> None:
    save_model("llama tied", tmp_path / "model")

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield "model.norm.weight", torch.ones(2)
        raise OSError("disk full")

    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "kept").write_text("old")
    with pytest.raises(OSError, match="disk full"):
        export_folder(broken(), str(tmp_path / "out"), model_dir=str(tmp_path / "model"), dtype="float32")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model", "out"]
    assert (tmp_path / "out" / "kept").exists()


def test_a_folder_that_lacks_a_weight_is_refused_by_name(tmp_path: Path) -> None:
    save_model("qwen3 tied", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(ValueError, match=r"has no weight 'model.layers.2.input_layernorm.weight'"), rank_of(tmp_path):
        pass


def test_every_weight_is_listed_once() -> None:
    shape = read_shape({**Qwen2Config(num_hidden_layers=2).to_dict(), "architectures": ["Qwen2ForCausalLM"]})
    names = [name for weight in weights_of(shape) for name in weight.hf_names]
    assert len(names) == len(set(names)) == 2 * 12 + 3
