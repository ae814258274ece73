"""Ranks that share the tokens of samples see each token once, and together compute what one rank does."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from milepost.engines.megatron_attention import (
    boundaries,
    causal,
    chunks_flash,
    chunks_masked,
    flash_kernel,
    packed_padded,
)
from milepost.engines.megatron_batch import MicroBatch, Sample, micro_batch
from milepost.engines.row_split import RowSplit, chunk_columns

CPU = torch.device("cpu")


def samples(lengths: list[tuple[int, int]]) -> list[Sample]:
    """One of each number of prompt and response tokens; no token occurs twice."""
    found, first = [], 0
    for row, (prompt, response) in enumerate(lengths):
        tokens = np.arange(first, first + prompt + response, dtype=np.int32)
        found.append(Sample(row, f"s{row}", tokens[:prompt], tokens[prompt:], {}))
        first += prompt + response
    return found


def shares(made: list[Sample], ranks: int, *, packing: bool, sequence_ranks: int = 1) -> list[MicroBatch]:
    splits = [RowSplit(rank, ranks, sequence_ranks) for rank in range(ranks)]
    return [micro_batch(made, [], CPU, packing=packing, ranks=split) for split in splits]


def test_a_rank_has_an_early_and_a_late_chunk_of_every_sample() -> None:
    table = chunk_columns(torch.tensor([0, 8, 12]), 12, 2)
    assert table.tolist() == [[0, 1, 8], [2, 3, 9], [4, 5, 10], [6, 7, 11]]
    assert RowSplit(0, 2).own(table).tolist() == [0, 1, 8, 6, 7, 11]
    assert RowSplit(1, 2).own(table).tolist() == [2, 3, 9, 4, 5, 10]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(1, 4), st.integers(1, 4))
def test_rows_are_padded_by_less_than_what_ranks_need(lengths: list[int], ranks: int, sequence_ranks: int) -> None:
    split = RowSplit(0, ranks, sequence_ranks)
    columns = split.padded(lengths)
    assert sum(columns) % (ranks * sequence_ranks) == 0
    if ranks > 1:
        assert all(count % (2 * ranks) == 0 for count in columns)
    assert all(count - length < 2 * ranks for count, length in zip(columns[:-1], lengths[:-1], strict=True))
    assert 0 <= columns[-1] - lengths[-1] < 2 * ranks * (1 + sequence_ranks)


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=5),
    st.sampled_from([2, 3, 4]),
    st.sampled_from([1, 2]),
    st.booleans(),
)
def test_every_response_token_is_predicted_once_by_the_token_before_it(
    lengths: list[tuple[int, int]], ranks: int, sequence_ranks: int, packing: bool
) -> None:
    made = samples(lengths)
    found = shares(made, ranks, packing=packing, sequence_ranks=sequence_ranks)
    targets = torch.cat([batch.targets for batch in found])
    wanted = torch.from_numpy(np.concatenate([sample.response for sample in made]))
    order = torch.cat([batch.own for batch in found])
    assert torch.equal(targets[order.argsort()], wanted.long()) and sorted(order.tolist()) == list(range(len(wanted)))
    for batch in found:
        assert torch.equal(batch.tokens.view(-1)[batch.positions], batch.targets - 1)
        assert batch.tokens.shape[1] == found[0].tokens.shape[1] and batch.tokens.shape[1] % sequence_ranks == 0


def row(lengths: list[int], dtype: torch.dtype, device: torch.device) -> tuple[list[Tensor], Tensor]:
    """Queries, keys and values of a packed row, and where its samples begin."""
    torch.manual_seed(0)
    rows = [torch.randn(sum(lengths), heads, 16, dtype=dtype, device=device) for heads in (4, 2, 2)]
    return [tensor.requires_grad_() for tensor in rows], boundaries(lengths, device)


def by_chunks(rows: list[Tensor], starts: Tensor, ranks: int, *, kernel: object = None) -> Tensor:
    """The attention of all ranks, put back into the order of the row."""
    query, key, value = rows
    table = chunk_columns(starts[:, 0], len(query), ranks)
    splits = [RowSplit(rank, ranks) for rank in range(ranks)]
    gathered = [torch.cat([tensor[split.own(table)] for split in splits]) for tensor in (key, value)]
    parts = []
    for split in splits:
        own = query[split.own(table)]
        if kernel is not None:
            parts.append(chunks_flash(own, *gathered, starts, split, kernel))
            continue
        long = [tensor.unsqueeze(1) for tensor in (own, *gathered)]
        parts.append(chunks_masked(*long, starts[:, 0], split).squeeze(1))
    return torch.cat(parts)[torch.cat([split.own(table) for split in splits]).argsort()]


def kernel_in_words(query: Tensor, key: Tensor, value: Tensor, q: Tensor, k: Tensor, *longest: int) -> Tensor:
    """What the flash kernels say they do: in each sample, the last query sees all keys, and each before it one less."""
    parts = []
    for (first, last), (begin, end) in zip(pairwise(q.tolist()), pairwise(k.tolist()), strict=True):
        assert last - first <= longest[0] and end - begin <= longest[1]
        filler = query.new_zeros(end - begin - (last - first), *query.shape[1:])
        whole = torch.cat((filler, query[first:last])), key[begin:end], value[begin:end]
        parts.append(causal(*(tensor.unsqueeze(1) for tensor in whole)).squeeze(1)[len(filler) :])
    return torch.cat(parts)


@pytest.mark.parametrize("kernel", [None, kernel_in_words])
@pytest.mark.parametrize("ranks", [2, 3])
def test_attention_by_chunks_is_the_attention_of_whole_samples(ranks: int, kernel: object) -> None:
    rows, starts = row([12 * ranks, 2 * ranks, 4 * ranks], torch.float64, CPU)
    found, wanted = by_chunks(rows, starts, ranks, kernel=kernel), packed_padded(*rows, starts)
    torch.testing.assert_close(found, wanted)
    weights = torch.randn_like(wanted)
    slopes = [torch.autograd.grad((mixed * weights).sum(), rows) for mixed in (found, wanted)]
    torch.testing.assert_close(*slopes)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the flash kernels run on a GPU")
def test_the_flash_kernels_do_what_they_say() -> None:
    rows, starts = row([384, 64, 128], torch.bfloat16, torch.device("cuda"))
    found = by_chunks(rows, starts, 2, kernel=flash_kernel(2))
    torch.testing.assert_close(found, packed_padded(*rows, starts), atol=2e-2, rtol=2e-2)
