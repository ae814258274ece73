"""A config is read, refused or split as the trainer can."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from milepost.engines.model_layout import Rope, check_layout, parameter_count, read_shape
from milepost.storage.parameters import ModelSection

SIZES = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
CONFIG = {"architectures": ["LlamaForCausalLM"], **SIZES}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("config", [LlamaConfig, Qwen2Config, Qwen3Config])
def test_parameters_are_counted_as_transformers_has_them(config: type[PreTrainedConfig], tied: bool) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config(**SIZES, tie_word_embeddings=tied))
    assert (
        parameter_count({**model.config.to_dict(), "architectures": [type(model).__name__]}) == model.num_parameters()
    )


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"tensor_parallel": 3}, "tensor_parallel is 3, it must divide the model's 4 attention heads"),
        ({"tensor_parallel": 4}, "tensor_parallel is 4, it must divide the model's 2 key-value heads"),
        ({"pipeline_parallel": 4}, "pipeline_parallel is 4, it must divide the model's 2 layers"),
        ({"sequence_parallel": True}, "sequence_parallel is on and tensor_parallel is 1: set it to 2 or more"),
    ],
)
def test_a_layout_that_does_not_divide_the_model_is_refused(layout: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_layout(CONFIG, ModelSection(**layout))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "architecture 'MixtralForCausalLM' cannot be trained"),
        (
            {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 128},
            "'Qwen3MoeForCausalLM' is a mixture of 128 experts and cannot be trained, use one of Llama",
        ),
        ({"architectures": []}, "architecture None cannot be trained"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope scaling 'yarn' cannot be trained"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope scaling 'linear' has no 'factor'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' cannot be trained, only 'silu'"),
        ({"mlp_bias": True}, "mlp_bias is true in config.json"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 key-value heads evenly"),
        ({"vocab_size": None}, "vocab_size is None in config.json, it must be a number"),
    ],
)
def test_a_model_that_cannot_be_trained_exactly_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_shape({**CONFIG, **change})


def test_a_config_without_its_sizes_is_refused() -> None:
    with pytest.raises(ValueError, match="config.json has no 'num_attention_heads'"):
        read_shape({"architectures": ["LlamaForCausalLM"]})


def test_rope_is_read_from_old_and_new_configs() -> None:
    old = read_shape({**CONFIG, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}})
    new = read_shape({**CONFIG, "rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}})
    assert old.rope == new.rope == Rope(5e5, "linear", 2.0)


def test_the_vocabulary_is_padded_to_a_multiple_of_the_ranks() -> None:
    shape = read_shape({**CONFIG, "vocab_size": 67})
    assert [shape.padded_vocab(ranks) for ranks in (1, 2, 8)] == [67, 68, 72]
