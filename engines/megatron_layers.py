"""What the layers of Megatron's local spec are made of here: its own parts, on torch's kernels, for any layout."""

from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

from milepost.engines.megatron_attention import CausalAttention


class RowLinear(RowParallelLinear):  # type: ignore[misc]
    """Megatron's, which does not pass its group on: each product would warn of that and end a compiled graph."""

    def _forward_impl(self, **options: Any) -> Any:
        return super()._forward_impl(**options | {"tp_group": self.tp_group})


class Norm(torch.nn.RMSNorm):
    """Torch's, which Megatron itself refuses with sequence parallelism.

    Each rank then normalises a part of the row, so Megatron has to add up what the ranks have of its gradient.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **options: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def block_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """The layers of this rank's pipeline stage."""
    spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    layer, attention = spec.submodules, spec.submodules.self_attention.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = Norm
    attention.core_attention, attention.linear_proj = CausalAttention, RowLinear
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = Norm
    # A spec in megatron-core 0.16, a partial in 0.19.
    mlp = layer.mlp
    (mlp.keywords["submodules"] if isinstance(mlp, partial) else mlp.submodules).linear_fc2 = RowLinear
    return TransformerBlockSubmodules(layer_specs=[spec] * get_num_layers_to_build(config), layer_norm=Norm)
