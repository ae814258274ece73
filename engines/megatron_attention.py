"""Causal attention for Megatron's local layer spec, on torch's own kernels: padded rows, or packed samples.

Packed samples stand behind each other in one row, and `boundaries` says where they begin. It is a tensor, so that it
passes through Megatron's layers, pipelines and recomputation in the place of the attention mask, which is not needed.
"""

import inspect
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import RowParallelLinear
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # before torch 2.10
    varlen_attn = None


def boundaries(lengths: list[int], device: torch.device) -> Tensor:
    """Where packed samples of `lengths` begin and end, `[samples + 1, longest]`: int32, the same in every column.

    The width tells the longest sample without asking the GPU; it takes no memory.
    """
    starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return starts.to(device)[:, None].expand(-1, max(lengths))


def _varlen_options(group: int) -> dict[str, Any]:
    """Causal, with `group` query heads a key-value head, in the words of the torch that is installed.

    Torch without `enable_gqa` asks nothing: its kernels take fewer key-value heads as they are.
    """
    known = inspect.signature(varlen_attn).parameters
    causal: dict[str, Any] = {"is_causal": True} if "is_causal" in known else {"window_size": (-1, 0)}
    return causal | ({"enable_gqa": group > 1} if "enable_gqa" in known else {})


def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention over rows `[time, batch, heads, head_dim]`."""
    mixed = scaled_dot_product_attention(
        query.permute(1, 2, 0, 3),
        key.permute(1, 2, 0, 3),
        value.permute(1, 2, 0, 3),
        is_causal=True,
        enable_gqa=query.shape[2] != key.shape[2],
    )
    return mixed.permute(2, 0, 1, 3)


def packed_flash(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, *, options: dict[str, Any]) -> Tensor:
    """Attention inside each sample of `[tokens, heads, head_dim]`, 16-bit, by the variable-length flash kernels."""
    longest, offsets = starts.shape[1], starts[:, 0].contiguous()
    mixed: Tensor = varlen_attn(query, key, value, offsets, offsets, longest, longest, **options)
    return mixed


def packed_padded(query: Tensor, key: Tensor, value: Tensor, starts: Tensor) -> Tensor:
    """The same for any type and device: samples are padded for the attention alone."""
    samples, longest = starts.shape[0] - 1, starts.shape[1]
    offsets, places = starts[:, 0].long(), torch.arange(query.shape[0], device=query.device)
    sample = torch.bucketize(places, offsets[1:], right=True)
    row = places - offsets[sample]

    def padded(tensor: Tensor) -> Tensor:
        empty = tensor.new_zeros(longest, samples, *tensor.shape[1:])
        return empty.index_put((row, sample), tensor)

    return causal(padded(query), padded(key), padded(value))[row, sample]


class CausalAttention(torch.nn.Module):
    """Megatron's core attention. Padding is at the end of a row, so the causal mask alone keeps it out."""

    def __init__(
        self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str, **options: Any
    ) -> None:
        super().__init__()
        group = config.num_attention_heads // config.num_query_groups
        self._varlen = _varlen_options(group) if varlen_attn is not None else None

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *args: Any, **options: Any
    ) -> Tensor:
        """`query` is [time, batch, heads, head_dim], `key` and `value` have the key-value heads; the result is
        [time, batch, heads * head_dim]. `attention_mask` is None, or the `boundaries` of a single packed row."""
        if attention_mask is None or attention_mask.shape[0] == 2:
            return causal(query, key, value).flatten(2)
        rows = query.squeeze(1), key.squeeze(1), value.squeeze(1), attention_mask
        if self._varlen is not None and query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
            return packed_flash(*rows, options=self._varlen).flatten(1).unsqueeze(1)
        return packed_padded(*rows).flatten(1).unsqueeze(1)


class RowLinear(RowParallelLinear):  # type: ignore[misc]
    """Megatron's, which does not pass its group on: each product would warn of that and end a compiled graph."""

    def _forward_impl(self, **options: Any) -> Any:
        return super()._forward_impl(**options | {"tp_group": self.tp_group})


def layer_spec(*, qk_norm: bool) -> Any:
    """Megatron's local transformer layer with RMS norms and this attention."""
    spec = get_gpt_layer_local_spec(qk_layernorm=qk_norm, normalization="RMSNorm")
    attention, mlp = spec.submodules.self_attention.submodules, spec.submodules.mlp
    attention.core_attention, attention.linear_proj = CausalAttention, RowLinear
    # A spec in megatron-core 0.16, a partial in 0.19.
    (mlp.keywords["submodules"] if isinstance(mlp, partial) else mlp.submodules).linear_fc2 = RowLinear
    return spec
