"""Log-probabilities and entropies from hidden states: by hand, and against torch however they are cut."""

import math
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from milepost.engines.megatron_logprobs import OutputLayer, taken_logprobs, taken_logprobs_and_entropy


def layer_of(weight: Tensor, vocab: int, **options: Any) -> OutputLayer:
    """An output layer of these weights, which have a gradient to add to, as under Megatron."""
    weight.main_grad = torch.zeros(weight.shape)
    return OutputLayer(weight, vocab, **options)


def places(*targets: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states that choose row after row of logits, which are columns of the weights, and the tokens taken."""
    return torch.eye(len(targets), requires_grad=True), torch.arange(len(targets)), torch.tensor(targets)


def test_logprobs_are_right_by_hand() -> None:
    """softmax of (0, ln 3) is (1/4, 3/4); at temperature 2 the second is sqrt(3) / (1 + sqrt(3))."""
    layer = layer_of(torch.tensor([[1.0], [3.0]]).log(), 2)
    found = taken_logprobs(*places(1), temperature=1.0, layer=layer)
    assert found.exp().item() == pytest.approx(0.75)
    found = taken_logprobs(*places(1), temperature=2.0, layer=layer)
    assert found.exp().item() == pytest.approx(3**0.5 / (1 + 3**0.5))


def test_entropy_is_right_by_hand() -> None:
    """That of (1/4, 3/4) is 1/4 ln 4 + 3/4 ln 4/3; where all tokens are as likely nothing raises it."""
    layer = layer_of(torch.tensor([[1.0, 2.0], [3.0, 2.0], [9.0, 9.0]]).log(), 2)
    _, entropy = taken_logprobs_and_entropy(*places(1, 0), temperature=1.0, layer=layer)
    assert entropy.tolist() == pytest.approx([math.log(4) / 4 + 3 * math.log(4 / 3) / 4, math.log(2)])
    entropy.sum().backward()
    # -p (ln p + H) of the first token is -1/4 (ln 1/4 + H), and the opposite of the second.
    slope = 3 * math.log(3) / 16
    slopes = layer.weight.main_grad.t().tolist()
    assert slopes == [pytest.approx([slope, -slope, 0], abs=1e-7), pytest.approx([0, 0, 0], abs=1e-7)]


def test_a_token_that_is_certain_has_no_entropy_and_finite_slopes() -> None:
    layer = layer_of(torch.tensor([[1e4], [-1e4], [-torch.inf]]), 3)
    logprobs, entropy = taken_logprobs_and_entropy(*places(0), temperature=1.0, layer=layer)
    (logprobs + entropy).sum().backward()
    assert (logprobs.item(), entropy.item()) == (0.0, 0.0) and layer.weight.main_grad.eq(0).all()


@given(chunk=st.integers(1, 200), part=st.integers(1, 40), padding=st.integers(0, 3), seed=st.integers(0, 99))
@settings(deadline=None)
def test_neither_values_nor_gradients_depend_on_chunks_or_padding(
    chunk: int, part: int, padding: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = torch.randn(6, 4, generator=generator), torch.randn(5 + padding, 4, generator=generator)
    positions, targets = torch.tensor([4, 0, 2]), torch.randint(5, (3,), generator=generator)
    hidden.requires_grad_()
    layer, exact = layer_of(weight, 5, chunk_bytes=chunk, float_elements=part), weight.clone().requires_grad_()
    found = taken_logprobs_and_entropy(hidden, positions, targets, temperature=0.5, layer=layer)
    log_softmax = torch.log_softmax((hidden @ exact.t())[positions, :5] / 0.5, 1)
    wanted = log_softmax.gather(1, targets[:, None])[:, 0], -(log_softmax.exp() * log_softmax).sum(1)
    torch.testing.assert_close(found, wanted)
    alone = taken_logprobs(hidden, positions, targets, temperature=0.5, layer=layer)
    assert torch.equal(alone, found[0])
    weights = torch.randn(2, 3, generator=generator)
    totals = [(torch.stack(values) * weights).sum() for values in (found, wanted)]
    (back,) = torch.autograd.grad(totals[0], hidden)
    torch.testing.assert_close((back, layer.weight.main_grad), torch.autograd.grad(totals[1], (hidden, exact)))


def test_logits_are_made_for_what_was_taken_and_a_chunk_at_a_time() -> None:
    class Counted(OutputLayer):
        def logits(self, hidden: Tensor) -> Tensor:
            made.append(len(hidden))
            return super().logits(hidden)

    def rows(chunk_bytes: int) -> list[int]:
        made.clear()
        layer = Counted(weight, 8, chunk_bytes=chunk_bytes)
        found = taken_logprobs(torch.ones(9, 2, requires_grad=True), *where, temperature=1.0, layer=layer)
        found.sum().backward()
        return list(made)

    made: list[int] = []
    where, weight = (torch.tensor([7, 1, 4, 2, 5]), torch.arange(5)), torch.ones(8, 2)
    weight.main_grad = torch.zeros(8, 2)
    assert rows(64) == [2, 2, 1, 2, 2, 1]  # rows of eight numbers of four bytes
    assert rows(160) == [5]  # kept for the backward pass


def test_where_no_token_was_taken_there_are_no_logits_and_no_gradient() -> None:
    layer, hidden = layer_of(torch.ones(3, 2), 3), torch.ones(4, 2, requires_grad=True)
    none = torch.zeros(0, dtype=torch.long)
    found = taken_logprobs_and_entropy(hidden, none, none, temperature=1.0, layer=layer)
    sum(values.sum() for values in found).backward()
    assert [len(values) for values in found] == [0, 0]
    assert hidden.grad.eq(0).all() and layer.weight.main_grad.eq(0).all()


def test_gradients_of_bfloat16_weights_are_summed_up_in_float32() -> None:
    """Each row gives 2**-10, which on top of 1 is nothing in bfloat16."""
    weight = torch.zeros(2, 1, dtype=torch.bfloat16)
    layer = layer_of(weight, 2, chunk_bytes=1)
    weight.main_grad.fill_(1)
    hidden, targets = torch.full((1024, 1), 2**-9, dtype=torch.bfloat16), torch.zeros(1024, dtype=torch.long)
    where = hidden.requires_grad_(), torch.arange(1024), targets
    taken_logprobs(*where, temperature=1.0, layer=layer).sum().backward()
    assert weight.main_grad.tolist() == [[2.0], [0.0]]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
@pytest.mark.parametrize("taken", [taken_logprobs, taken_logprobs_and_entropy])
def test_compiled_kernels_give_the_same_values_and_gradients(taken: Callable[..., Any]) -> None:
    hidden, weight = torch.randn(9, 6).requires_grad_(), torch.randn(50, 6)
    where = hidden, torch.tensor([1, 3, 8]), torch.tensor([0, 47, 5])

    def numbers(compiled: bool) -> tuple[Tensor, ...]:
        layer = layer_of(weight.clone(), 48, compiled=compiled, chunk_bytes=400)
        values = torch.stack([*taken(*where, temperature=0.7, layer=layer)])
        return values, *torch.autograd.grad((values**2).sum(), hidden), layer.weight.main_grad

    torch.testing.assert_close(numbers(True), numbers(False))
