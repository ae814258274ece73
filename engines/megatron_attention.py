"""Causal attention for Megatron's local layer spec, on torch's own kernels: padded rows, or packed samples.

Packed samples stand behind each other in one row, and `boundaries` says where they begin. It is a tensor, so that it
passes through Megatron's layers, pipelines and recomputation in the place of the attention mask, which is not needed.
Context-parallel ranks have chunks of the row (see row_split), and gather the keys and values of all of it.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from milepost.engines.row_split import WHOLE, RowSplit, chunk_columns

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


def flash_kernel(group: int) -> Callable[..., Tensor] | None:
    """Torch's variable-length attention, causal, with `group` query heads a key-value head; None before torch 2.10.

    Torch without `enable_gqa` asks nothing: its kernels take fewer key-value heads as they are.
    """
    if varlen_attn is None:
        return None
    known = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"is_causal": True} if "is_causal" in known else {"window_size": (-1, 0)}
    if "enable_gqa" in known:
        options["enable_gqa"] = group > 1
    kernel: Callable[..., Any] = partial(varlen_attn, **options)
    return kernel


def _by_heads(query: Tensor, key: Tensor, value: Tensor, **mask: Any) -> Tensor:
    """Torch's attention over rows `[time, batch, heads, head_dim]`, which it wants in another order."""
    rows = [row.permute(1, 2, 0, 3) for row in (query, key, value)]
    mixed = scaled_dot_product_attention(*rows, **mask, enable_gqa=query.shape[2] != key.shape[2])
    return mixed.permute(2, 0, 1, 3)


def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention over rows `[time, batch, heads, head_dim]`."""
    return _by_heads(query, key, value, is_causal=True)


def packed_flash(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, kernel: Callable[..., Tensor]) -> Tensor:
    """Attention inside each sample of `[tokens, heads, head_dim]`, 16-bit, by the variable-length flash kernels."""
    longest, offsets = starts.shape[1], starts[:, 0].contiguous()
    return kernel(query, key, value, offsets, offsets, longest, longest)


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


def chunks_masked(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, split: RowSplit) -> Tensor:
    """Attention of this rank's chunks of rows `[time, batch, heads, head_dim]`, for any type and device.

    `key` and `value` are of all ranks, behind each other; `starts` says where the samples of a row begin and end.
    """
    table = chunk_columns(starts, key.shape[0], split.ranks)
    columns, own = table[split.order].flatten(), split.own(table)
    first = starts[torch.bucketize(own, starts[1:], right=True)]  # of the sample of each query
    mask = (columns <= own[:, None]) & (columns >= first[:, None])
    return _by_heads(query, key, value, attn_mask=mask)


def chunks_flash(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, split: RowSplit, kernel: Callable[..., Tensor]
) -> Tensor:
    """The same for packed samples, `[tokens, heads, head_dim]`, by the flash kernels: one call for each of two chunks.

    The queries of chunk k are the last of the first k + 1 chunks of their sample, and the kernels' causal mask is
    aligned to the end, so each call has the keys up to there.
    """
    longest, offsets = starts.shape[1] // (2 * split.ranks), starts[:, 0] // (2 * split.ranks)
    table = chunk_columns(starts[:, 0], key.shape[0], split.ranks)
    place = table[split.order].flatten().argsort()  # where the column of a row is among gathered ones
    mixed = []
    for chunk, part in zip(split.chunks, query.chunk(2), strict=True):
        until = place[table[: chunk + 1].flatten().sort().values]
        rows = part, key.index_select(0, until), value.index_select(0, until)
        ends = offsets * (chunk + 1)
        mixed.append(kernel(*rows, offsets, ends, longest, longest * (chunk + 1)))
    return torch.cat(mixed)


class CausalAttention(torch.nn.Module):
    """Megatron's core attention. Padding is at the end of a row, so the causal mask alone keeps it out."""

    def __init__(
        self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str, **options: Any
    ) -> None:
        super().__init__()
        self._flash = flash_kernel(config.num_attention_heads // config.num_query_groups)
        self._group = parallel_state.get_context_parallel_group() if config.context_parallel_size > 1 else None
        self._split = RowSplit(self._group.rank(), self._group.size()) if self._group is not None else WHOLE

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *args: Any, **options: Any
    ) -> Tensor:
        """`query` is [time, batch, heads, head_dim], `key` and `value` have the key-value heads; the result is
        [time, batch, heads * head_dim]. `attention_mask` is None, or the `boundaries` of a single packed row."""
        flash = self._flash if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) else None
        if self._group is not None:
            return self._of_chunks(query, key, value, attention_mask, flash).flatten(2)
        if attention_mask is None or attention_mask.shape[0] == 2:
            return causal(query, key, value).flatten(2)
        rows = query.squeeze(1), key.squeeze(1), value.squeeze(1), attention_mask
        mixed = packed_flash(*rows, flash) if flash else packed_padded(*rows)
        return mixed.flatten(1).unsqueeze(1)

    def _of_chunks(self, query: Tensor, key: Tensor, value: Tensor, starts: Tensor | None, flash: Any) -> Tensor:
        """Gathering keys and values adds up, on the way back, what the queries of all ranks say of their gradient."""
        whole = gather_from_sequence_parallel_region(torch.cat((key, value), dim=-1), group=self._group)
        keys, values = whole.chunk(2, dim=-1)
        if starts is not None and flash:
            rows = query.squeeze(1), keys.squeeze(1), values.squeeze(1)
            return chunks_flash(*rows, starts, self._split, flash).unsqueeze(1)
        ends = torch.tensor([0, len(keys)], device=query.device) if starts is None else starts[:, 0]
        return chunks_masked(query, keys, values, ends, self._split)
