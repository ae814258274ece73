"""Log-probabilities and entropies from logits: by hand, and against torch however they are cut."""

import math
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from milepost.engines.megatron_logprobs import VocabSlice, taken_logprobs, taken_logprobs_and_entropy


def test_logprobs_are_right_by_hand() -> None:
    """softmax of (0, ln 3) is (1/4, 3/4); at temperature 2 the second is sqrt(3) / (1 + sqrt(3))."""
    logits = torch.tensor([[1.0, 3.0]]).log()
    found = taken_logprobs(logits, torch.tensor([0]), torch.tensor([1]), temperature=1.0, columns=VocabSlice(2))
    assert found.exp().item() == pytest.approx(0.75)
    found = taken_logprobs(logits, torch.tensor([0]), torch.tensor([1]), temperature=2.0, columns=VocabSlice(2))
    assert found.exp().item() == pytest.approx(3**0.5 / (1 + 3**0.5))


def test_entropy_is_right_by_hand() -> None:
    """That of (1/4, 3/4) is 1/4 ln 4 + 3/4 ln 4/3; where all tokens are as likely nothing raises it."""
    logits = torch.tensor([[1.0, 3.0, 9.0], [2.0, 2.0, 9.0]]).log().requires_grad_()
    places, targets = torch.tensor([0, 1]), torch.tensor([1, 0])
    _, entropy = taken_logprobs_and_entropy(logits, places, targets, temperature=1.0, columns=VocabSlice(2))
    assert entropy.tolist() == pytest.approx([math.log(4) / 4 + 3 * math.log(4 / 3) / 4, math.log(2)])
    (slopes,) = torch.autograd.grad(entropy.sum(), logits)
    # -p (ln p + H) of the first token is -1/4 (ln 1/4 + H), and the opposite of the second.
    slope = 3 * math.log(3) / 16
    assert slopes.tolist() == [pytest.approx([slope, -slope, 0], abs=1e-7), pytest.approx([0, 0, 0], abs=1e-7)]


def test_a_token_that_is_certain_has_no_entropy_and_finite_slopes() -> None:
    logits = torch.tensor([[1e4, -1e4, -torch.inf]]).requires_grad_()
    where = logits, torch.tensor([0]), torch.tensor([0])
    logprobs, entropy = taken_logprobs_and_entropy(*where, temperature=1.0, columns=VocabSlice(3))
    (slopes,) = torch.autograd.grad((logprobs + entropy).sum(), logits)
    assert (logprobs.item(), entropy.item()) == (0.0, 0.0) and slopes.eq(0).all()


@given(chunk=st.integers(1, 40), padding=st.integers(0, 3), seed=st.integers(0, 99))
@settings(deadline=None)
def test_neither_values_nor_gradients_depend_on_chunks_or_padding(chunk: int, padding: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(6, 5 + padding, generator=generator, dtype=torch.float32).requires_grad_()
    positions, targets = torch.tensor([4, 0, 2]), torch.randint(5, (3,), generator=generator)
    columns = VocabSlice(5, chunk_elements=chunk)
    found = taken_logprobs_and_entropy(logits, positions, targets, temperature=0.5, columns=columns)
    log_softmax = torch.log_softmax(logits[positions, :5] / 0.5, 1)
    wanted = log_softmax.gather(1, targets[:, None])[:, 0], -(log_softmax.exp() * log_softmax).sum(1)
    torch.testing.assert_close(found, wanted)
    alone = taken_logprobs(logits, positions, targets, temperature=0.5, columns=columns)
    assert torch.equal(alone, found[0])
    weights = torch.randn(2, 3, generator=generator)
    totals = [(torch.stack(values) * weights).sum() for values in (found, wanted)]
    torch.testing.assert_close(*(torch.autograd.grad(total, logits, retain_graph=True)[0] for total in totals))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
@pytest.mark.parametrize("taken", [taken_logprobs, taken_logprobs_and_entropy])
def test_compiled_kernels_give_the_same_values_and_gradients(taken: Callable[..., Any]) -> None:
    logits, positions, targets = torch.randn(9, 50).requires_grad_(), torch.tensor([1, 3, 8]), torch.tensor([0, 47, 5])
    found = [
        torch.stack([*taken(logits, positions, targets, temperature=0.7, columns=VocabSlice(48, compiled=compiled))])
        for compiled in (False, True)
    ]
    torch.testing.assert_close(*found)
    torch.testing.assert_close(*(torch.autograd.grad((values**2).sum(), logits)[0] for values in found))
