"""Drawing tokens for a batch of rows.

The noise of a row is a pure function of its seed and position, so what else is in the batch changes nothing.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from milepost.engines.embedded_request import SamplingParams

_MASK_31 = 0x7FFFFFFF
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class SamplingRows:
    """The sampling parameters of a batch as columns of shape [rows, 1]; optional parts are None when no row needs them.

    `banned` ([rows, vocabulary], bool) holds each row's stop tokens, which it may not draw before `banned_until`.
    """

    temperature: torch.Tensor
    noise_scale: torch.Tensor
    seeds: np.ndarray
    columns: torch.Tensor
    truncated: torch.Tensor | None
    top_k: torch.Tensor
    top_p: torch.Tensor
    banned: torch.Tensor | None
    banned_until: torch.Tensor


def _mix64(values: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64: a bijection of uint64 whose output looks random."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = values ^ (values >> np.uint64(31))
    return mixed


def vocabulary_columns(vocab_size: int) -> torch.Tensor:
    """A fixed random int32 for each token id: [vocab_size]."""
    mixed = _mix64((np.arange(vocab_size, dtype=np.uint64) + np.uint64(1)) * _GOLDEN)
    return torch.from_numpy((mixed >> np.uint64(32)).astype(np.uint32).view(np.int32))


def sampling_rows(
    params: Sequence[SamplingParams], columns: torch.Tensor, *, stop_ids: Sequence[Collection[int]]
) -> SamplingRows:
    """The columns for `params`; `stop_ids` are the tokens that would end each row."""
    greedy = [item.temperature == 0 for item in params]
    truncated = [
        row for row, item in enumerate(params) if not greedy[row] and (item.top_p < 1 or 0 < item.top_k < len(columns))
    ]
    banned = None
    if any(item.min_new_tokens for item in params):
        banned = torch.zeros(len(params), len(columns), dtype=torch.bool)
        for row, tokens in enumerate(stop_ids):
            banned[row, list(tokens)] = True
    return SamplingRows(
        temperature=torch.tensor([[1.0 if item.temperature == 0 else item.temperature] for item in params]),
        noise_scale=torch.tensor([[0.0 if is_greedy else 1.0] for is_greedy in greedy]),
        seeds=_mix64(np.array([item.sampling_seed for item in params], dtype=np.uint64) + _GOLDEN),
        columns=columns,
        truncated=torch.tensor(truncated) if truncated else None,
        top_k=torch.tensor([[item.top_k if item.top_k > 0 else len(columns)] for item in params]),
        top_p=torch.tensor([[item.top_p] for item in params]),
        banned=banned,
        banned_until=torch.tensor([[item.min_new_tokens] for item in params]),
    )


def gumbel_noise(seeds: np.ndarray, positions: np.ndarray, columns: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise [rows, vocabulary]: a 64-bit key per row and position, hashed with each token's column."""
    keys = _mix64(seeds + positions.astype(np.uint64) * _GOLDEN).view(np.int32).reshape(-1, 2)
    low, high = torch.from_numpy(keys[:, :1].copy()), torch.from_numpy(keys[:, 1:].copy())
    hashed = columns ^ low
    hashed ^= (hashed >> 16) & 0xFFFF
    hashed *= 0x7FEB352D
    hashed ^= (hashed >> 15) & 0x1FFFF
    hashed += high
    hashed *= 0x2C1B3C6D
    hashed ^= (hashed >> 16) & 0xFFFF
    hashed *= 0x297A2D39
    hashed ^= (hashed >> 15) & 0x1FFFF
    # Small uniforms keep their full resolution in float32, and they are the ones that make a token win.
    uniform = (hashed & _MASK_31).to(torch.float32).add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _truncate(scores: torch.Tensor, logprobs: torch.Tensor, rows: SamplingRows) -> None:
    """Rule out, in place, what top-k and top-p exclude. Both look at the full distribution, as SGLang's do."""
    chosen = rows.truncated
    assert chosen is not None
    ordered, order = logprobs[chosen].sort(dim=-1, descending=True, stable=True)
    probability = ordered.exp()
    before = probability.cumsum(dim=-1) - probability
    excluded = (before > rows.top_p[chosen]) | (torch.arange(len(rows.columns)) >= rows.top_k[chosen])
    mask = torch.zeros_like(excluded).scatter_(1, order, excluded)
    scores[chosen] = scores[chosen].masked_fill(mask, -torch.inf)


def draw(logits: torch.Tensor, rows: SamplingRows, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One token for each row of `logits` ([rows, vocabulary], float32), and its log-probability.

    `positions` ([rows]) counts the tokens a row has drawn before. The log-probability is of the full distribution at
    the row's temperature, before top-k and top-p; a greedy row's is untempered.
    """
    logprobs = torch.log_softmax(logits / rows.temperature, dim=-1)
    scores = logprobs.clone()
    if rows.truncated is not None:
        _truncate(scores, logprobs, rows)
    if rows.banned is not None:
        scores.masked_fill_(rows.banned & (positions[:, None] < rows.banned_until), -torch.inf)
    if bool(rows.noise_scale.any()):
        scores += gumbel_noise(rows.seeds, positions.numpy(), rows.columns).mul_(rows.noise_scale)
    tokens = scores.argmax(dim=-1, keepdim=True)
    return tokens.squeeze(1), logprobs.gather(1, tokens).squeeze(1)
