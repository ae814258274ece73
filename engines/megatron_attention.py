"""Causal attention for Megatron's local layer spec, on torch's scaled_dot_product_attention."""

from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class CausalAttention(torch.nn.Module):
    """Megatron's core attention. Samples are padded at the end, so the causal mask alone keeps padding out."""

    def __init__(
        self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str, **options: Any
    ) -> None:
        super().__init__()

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> Tensor:
        """`query` is [time, batch, heads, head_dim], `key` and `value` have the key-value heads; the result is
        [time, batch, heads * head_dim]."""
        mixed = scaled_dot_product_attention(
            query.permute(1, 2, 0, 3),
            key.permute(1, 2, 0, 3),
            value.permute(1, 2, 0, 3),
            is_causal=True,
            enable_gqa=query.shape[2] != key.shape[2],
        )
        return mixed.permute(2, 0, 1, 3).flatten(2)


def layer_spec(*, qk_norm: bool) -> Any:
    """Megatron's local transformer layer with RMS norms and this attention."""
    spec = get_gpt_layer_local_spec(qk_layernorm=qk_norm, normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = CausalAttention
    return spec
