"""The shape of a dense decoder and how it may be split over ranks, read from a Hugging Face config alone (no torch).

What the trainer cannot compute exactly as transformers does is refused here, in one sentence.
"""

from dataclasses import dataclass
from typing import Any, Literal

from milepost.storage.parameters import ModelSection

ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # what families call their count
ROPE_TYPES = ("default", "linear", "llama3")
_DEFAULT_ROPE_THETA = 10000.0


@dataclass(frozen=True)
class Rope:
    """Rotary embedding: base frequency, and how long contexts are scaled. `factor` is 1 for `default`."""

    theta: float
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True)
class ModelShape:
    """Everything that decides the names and shapes of a model's weights, and its arithmetic."""

    family: Literal["llama", "qwen2", "qwen3"]
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    norm_eps: float
    tied: bool
    rope: Rope

    @property
    def qkv_bias(self) -> bool:
        return self.family == "qwen2"

    @property
    def qk_norm(self) -> bool:
        return self.family == "qwen3"

    def padded_vocab(self, tensor_parallel: int) -> int:
        """Rows of the embedding as it is split: the vocabulary rounded up to a multiple of the ranks."""
        return -(-self.vocab // tensor_parallel) * tensor_parallel


def read_shape(hf_config: dict[str, Any]) -> ModelShape:
    """The shape of the model in `config.json`; ValueError when it is not one of the supported dense families."""
    family = _family(hf_config)
    heads, hidden = _size(hf_config, "num_attention_heads"), _size(hf_config, "hidden_size")
    shape = ModelShape(
        family=family,
        layers=_size(hf_config, "num_hidden_layers"),
        hidden=hidden,
        intermediate=_size(hf_config, "intermediate_size"),
        heads=heads,
        kv_heads=int(hf_config.get("num_key_value_heads") or heads),
        head_dim=int(hf_config.get("head_dim") or (128 if family == "qwen3" else hidden // heads)),
        vocab=_size(hf_config, "vocab_size"),
        context=int(hf_config.get("max_position_embeddings") or 2048),
        norm_eps=float(hf_config.get("rms_norm_eps", 1e-6)),
        tied=bool(hf_config.get("tie_word_embeddings", False)),
        rope=_rope(hf_config),
    )
    _check_arithmetic(hf_config, shape)
    return shape


def _size(hf_config: dict[str, Any], name: str) -> int:
    if name not in hf_config:
        raise ValueError(f"config.json has no {name!r}: it is not a complete model config")
    if not isinstance(hf_config[name], int) or hf_config[name] < 1:
        raise ValueError(f"{name} is {hf_config[name]!r} in config.json, it must be a number of 1 or more")
    return int(hf_config[name])


def _family(hf_config: dict[str, Any]) -> Any:
    names = hf_config.get("architectures") or []
    if not names and hf_config.get("model_type") in ARCHITECTURES.values():
        return hf_config["model_type"]
    if not names or names[0] not in ARCHITECTURES:
        name = names[0] if names else hf_config.get("model_type")
        count = next((hf_config[key] for key in EXPERTS if hf_config.get(key)), 0)
        experts = f" is a mixture of {count} experts and" if count else ""
        known = ", ".join(sorted(ARCHITECTURES))
        raise ValueError(f"architecture {name!r}{experts} cannot be trained, use one of {known}")
    return ARCHITECTURES[names[0]]


def _rope(hf_config: dict[str, Any]) -> Rope:
    """From `rope_parameters`, or `rope_theta` and `rope_scaling` as configs before transformers 5 have them."""
    values = {**(hf_config.get("rope_scaling") or {}), **(hf_config.get("rope_parameters") or {})}
    kind = values.get("rope_type", values.get("type", "default"))
    theta = float(values.get("rope_theta") or hf_config.get("rope_theta") or _DEFAULT_ROPE_THETA)
    if kind not in ROPE_TYPES:
        raise ValueError(f"rope scaling {kind!r} cannot be trained, use one of {', '.join(ROPE_TYPES)}")
    if float(values.get("partial_rotary_factor") or hf_config.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ValueError("partial_rotary_factor below 1 cannot be trained, the whole head must be rotated")
    if kind == "default":
        return Rope(theta)
    try:
        if kind == "linear":
            return Rope(theta, "linear", float(values["factor"]))
        bands = float(values["low_freq_factor"]), float(values["high_freq_factor"])
        return Rope(theta, "llama3", float(values["factor"]), *bands, int(values["original_max_position_embeddings"]))
    except KeyError as error:
        raise ValueError(f"rope scaling {kind!r} has no {error.args[0]!r} in config.json") from None


def _check_arithmetic(hf_config: dict[str, Any], shape: ModelShape) -> None:
    """Refuse the options of a supported family that change its arithmetic and that the trainer does not have."""
    activation = hf_config.get("hidden_act", "silu")
    if activation != "silu":
        raise ValueError(f"hidden_act {activation!r} cannot be trained, only 'silu'")
    for name in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if hf_config.get(name) and not (name == "attention_bias" and shape.qkv_bias):
            raise ValueError(f"{name} is true in config.json: {shape.family} models with it cannot be trained")
    if hf_config.get("attention_dropout"):
        raise ValueError(f"attention_dropout is {hf_config['attention_dropout']}: set it to 0, dropout is not trained")
    if hf_config.get("quantization_config"):
        raise ValueError("config.json has a quantization_config: training needs the unquantized weights")
    if shape.heads % shape.kv_heads:
        raise ValueError(f"{shape.heads} attention heads cannot share {shape.kv_heads} key-value heads evenly")


def check_layout(hf_config: dict[str, Any], model: ModelSection) -> None:
    """ValueError unless the model of `config.json` can be split as `model` says."""
    shape = read_shape(hf_config)
    if model.sequence_parallel and model.tensor_parallel == 1:
        raise ValueError("sequence_parallel is on and tensor_parallel is 1: set it to 2 or more, or turn that off")
    for name, parts, what, whole in (
        ("tensor_parallel", model.tensor_parallel, "attention heads", shape.heads),
        ("tensor_parallel", model.tensor_parallel, "key-value heads", shape.kv_heads),
        ("tensor_parallel", model.tensor_parallel, "columns of the feed-forward layer", shape.intermediate),
        ("pipeline_parallel", model.pipeline_parallel, "layers", shape.layers),
    ):
        if whole % parts:
            raise ValueError(f"{name} is {parts}, it must divide the model's {whole} {what}")


def parameter_count(hf_config: dict[str, Any]) -> int:
    """Parameters of the model in `config.json`; a tied output layer counts once."""
    shape = read_shape(hf_config)
    query, key_value = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention = shape.hidden * (2 * query + 2 * key_value)
    extras = (query + 2 * key_value) * shape.qkv_bias + 2 * shape.head_dim * shape.qk_norm
    layer = attention + extras + 3 * shape.hidden * shape.intermediate + 2 * shape.hidden
    return shape.layers * layer + shape.hidden + shape.vocab * shape.hidden * (1 if shape.tied else 2)
