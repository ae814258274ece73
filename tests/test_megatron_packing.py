"""Samples packed behind each other are computed as if each were alone."""

import numpy as np
import torch

from milepost.engines.megatron_attention import boundaries, causal, packed_padded
from milepost.engines.megatron_batch import Sample, micro_batch

CPU = torch.device("cpu")


def sample(prompt: int, response: int, row: int = 0) -> Sample:
    tokens = np.arange(prompt + response, dtype=np.int32)
    columns = {"advantages": np.full(response, row + 1, np.float32)}
    return Sample(row, f"s{row}", tokens[:prompt], tokens[prompt:], columns)


def test_packed_samples_have_no_padding_and_predict_their_own_tokens() -> None:
    batch = micro_batch([sample(2, 3), sample(3, 1, 1)], ["advantages"], CPU, packing=True)
    assert batch.tokens.tolist() == [[0, 1, 2, 3, 0, 1, 2]]
    assert batch.places.tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert batch.boundaries is not None and batch.boundaries[:, 0].tolist() == [0, 4, 7]
    assert (batch.positions.tolist(), batch.targets.tolist()) == ([1, 2, 3, 6], [2, 3, 4, 3])
    assert batch.columns["advantages"].tolist() == [[0, 1, 1, 1], [0, 0, 2, 0]]
    assert batch.columns["advantages"].view(-1)[batch.cells].tolist() == [1, 1, 1, 2]


def test_a_rank_without_samples_computes_one_padding_token() -> None:
    batch = micro_batch([], ["advantages"], CPU, packing=True)
    assert (batch.tokens.tolist(), batch.positions.tolist()) == ([[0]], [])


def test_packed_attention_is_the_attention_of_each_sample_alone() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(9, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    together = packed_padded(query, key, value, boundaries([4, 2, 3], CPU))
    parts = zip(*(tensor.split([4, 2, 3]) for tensor in (query, key, value)), strict=True)
    alone = torch.cat([causal(*(tensor.unsqueeze(1) for tensor in part)).squeeze(1) for part in parts])
    torch.testing.assert_close(together, alone, atol=1e-12, rtol=0)
    weights = torch.randn_like(alone)
    found, wanted = (torch.autograd.grad((out * weights).sum(), (query, key, value)) for out in (together, alone))
    torch.testing.assert_close(found, wanted, atol=1e-12, rtol=0)
