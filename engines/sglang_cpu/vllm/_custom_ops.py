"""The one kernel of vLLM's that SGLang calls on a CPU without AMX."""

import torch


def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
) -> None:
    """Rotate `query` and `key`, [tokens, heads * head_size], in place; the cache is [positions, cosines and sines]."""
    flat = positions.flatten()
    cosines, sines = cos_sin_cache.index_select(0, flat).chunk(2, dim=-1)
    for states in (query, key):
        if states is None:
            continue
        heads = states.view(flat.shape[0], -1, head_size)[..., : 2 * cosines.shape[-1]]
        cos, sin = cosines[:, None].to(heads.dtype), sines[:, None].to(heads.dtype)
        if is_neox:
            left, right = heads.chunk(2, dim=-1)
            heads.copy_(torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1))
        else:
            left, right = heads[..., ::2], heads[..., 1::2]
            heads.copy_(torch.stack((left * cos - right * sin, right * cos + left * sin), dim=-1).flatten(-2))
