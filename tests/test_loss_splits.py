"""Loss and gradient are those of the whole batch in double precision, however it is cut into micro-batches.

From the logits on, in the trainer's own arithmetic: float32, in chunks, with all terms that a loss can have.
"""

from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from milepost.engines.divergence import KL_ESTIMATORS
from milepost.engines.loss_inputs import LossInputs, LossOutputs, count
from milepost.engines.loss_params import AGGREGATIONS, LOSSES
from milepost.engines.losses import get_loss
from milepost.engines.megatron_logprobs import OutputLayer, taken_logprobs_and_entropy

VOCAB, TEMPERATURE = 11, 0.7
# Old minus new log-probabilities: no sum or mean of them is near a bound, where rounding would decide.
MOVES = torch.tensor([-1.2, -0.5, -0.3, -0.1, 0.05, 0.1, 0.3, 0.5], dtype=torch.float64)
TERMS = {"clip_high": 0.28, "dual_clip": 3.0, "opsm_delta": 0.0123, "kl_coef": 0.1, "entropy_coef": 0.05}


@dataclass(frozen=True)
class Batch:
    """Rows of samples, in double precision."""

    logits: Tensor
    targets: Tensor
    old: Tensor
    rollout: Tensor
    reference: Tensor
    advantages: Tensor
    mask: Tensor
    weights: Tensor

    def cut(self, rows: Tensor) -> "Batch":
        """Some rows, no wider than their longest sample."""
        time = int(torch.cat([torch.ones(1), self.mask[rows].any(0).nonzero()[:, 0] + 1]).max())
        return Batch(*(getattr(self, field.name)[rows, :time] for field in fields(self)))


def random_batch(seed: int, rows: int, time: int) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, time, VOCAB, generator=draw, dtype=torch.float64) * 2
    targets = torch.randint(VOCAB, (rows, time), generator=draw)
    new = exact(logits, targets)[0]
    moves, advantages, other = torch.randn(3, rows, time, generator=draw, dtype=torch.float64)
    weights = torch.tensor([0.0, 0.5, 1.0, 1.7])[torch.randint(4, (rows, time), generator=draw)]
    old = new + MOVES[torch.randint(len(MOVES), (rows, time), generator=draw)]
    mask = torch.rand(rows, time, generator=draw) < 0.7
    return Batch(logits, targets, old, old + moves / 10, new + other / 2, advantages, mask, weights.double())


def exact(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies as they are written down."""
    found = torch.log_softmax(logits / TEMPERATURE, -1)
    return found.gather(-1, targets[..., None])[..., 0], -(found.exp() * found).sum(-1)


def trainers(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """From hidden states that are the logits, two rows of them at a time."""
    weight = torch.eye(VOCAB)
    weight.main_grad = torch.zeros(VOCAB, VOCAB)
    layer, places = OutputLayer(weight, VOCAB, chunk_bytes=2 * 4 * VOCAB), torch.arange(targets.numel())
    rows = logits.flatten(0, 1), places, targets.flatten()
    logprobs, entropy = taken_logprobs_and_entropy(*rows, temperature=TEMPERATURE, layer=layer)
    return logprobs.view_as(targets), entropy.view_as(targets)


def share(batch: Batch, taken: tuple[Tensor, Tensor], whole: Batch, name: str, params: dict[str, Any]) -> LossOutputs:
    kind = batch.logits.dtype
    columns = [column.to(kind) for column in (batch.old, batch.rollout, batch.reference, batch.advantages)]
    inputs = LossInputs(taken[0], *columns, batch.mask, count(whole.mask), batch.weights.to(kind), taken[1])
    return get_loss(name)(inputs, params)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_micro_batches_add_up_to_the_batch(name: str, aggregation: str, data: st.DataObject) -> None:
    rows, time = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 7))
    batch = random_batch(data.draw(st.integers(0, 10_000)), rows, time)
    order = torch.tensor(data.draw(st.permutations(range(rows))))
    cuts = sorted(data.draw(st.sets(st.integers(0, rows))) | {0, rows})
    estimator, unbiased = data.draw(st.sampled_from(list(KL_ESTIMATORS))), data.draw(st.booleans())
    params = {**TERMS, "aggregation": aggregation, "max_length": 9, "kl_estimator": estimator, "kl_unbiased": unbiased}

    batch.logits.requires_grad_()
    wanted = share(batch, exact(batch.logits, batch.targets), batch, name, params)
    wanted.loss.backward()
    logits = batch.logits.detach().float().requires_grad_()
    found = []
    for start, end in pairwise(cuts):
        part = Batch(logits, *(getattr(batch, field.name) for field in fields(batch)[1:])).cut(order[start:end])
        found.append(share(part, trainers(part.logits, part.targets), batch, name, params))
        found[-1].loss.backward()

    near = {"rel": 1e-5, "abs": 5e-6}  # log-probabilities are subtracted, and float32 has 1e-6 of one of -10
    assert float(sum(part.loss.detach() for part in found)) == pytest.approx(wanted.loss.item(), **near)
    for key, value in wanted.metrics.items():
        assert float(sum(part.metrics[key] for part in found)) == pytest.approx(float(value), **near)
    assert logits.grad is not None and batch.logits.grad is not None
    # Terms that cancel leave the noise of float32 that each of them had.
    assert (logits.grad - batch.logits.grad).norm() <= max(1e-5 * batch.logits.grad.norm(), 1e-6)
