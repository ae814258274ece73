"""Log-probabilities of taken tokens from logits that are split over tensor-parallel ranks by vocabulary.

Computed in float32 a chunk of positions at a time, so that no float32 copy of all logits exists.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class VocabSlice:
    """This rank's columns of the logits: `first` and on of `vocab`; columns past `vocab` are padding."""

    vocab: int
    first: int = 0
    group: Any = None  # process group of the ranks with the other columns
    chunk_elements: int = 1 << 24  # float32 logits in flight: 64 MiB

    def scaled(self, logits: Tensor, temperature: float) -> Tensor:
        """A float32 copy of `logits` over `temperature`, with padding columns at minus infinity."""
        scaled = logits.float() / temperature
        scaled[:, max(self.vocab - self.first, 0) :] = -torch.inf
        return scaled

    def columns(self, targets: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """The local column of each target, and whether it is local at all (column 0 stands in when not)."""
        local = targets - self.first
        own = (local >= 0) & (local < width)
        return torch.where(own, local, 0), own

    def reduce(self, tensor: Tensor, operation: Any) -> Tensor:
        if self.group is not None and self.group.size() > 1:
            dist.all_reduce(tensor, operation, group=self.group)
        return tensor


def taken_logprobs(
    logits: Tensor, positions: Tensor, targets: Tensor, *, temperature: float, columns: VocabSlice
) -> Tensor:
    """log_softmax(logits[positions] / temperature) of `targets`, float32 `[n]`, with gradient.

    `logits` is `[tokens, local vocabulary]`; `positions` are distinct rows of it, `targets` token ids.
    """
    result: Tensor = _TakenLogprobs.apply(logits, positions, targets, temperature, columns)
    return result


class _TakenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, positions: Tensor, targets: Tensor, temperature: float, columns: VocabSlice
    ) -> Tensor:
        taken = logits.new_empty(len(positions), dtype=torch.float32)
        normalizer = torch.empty_like(taken)
        step = max(1, columns.chunk_elements // logits.shape[1])
        for start in range(0, len(positions), step):
            rows = slice(start, start + step)
            scaled = columns.scaled(logits[positions[rows]], temperature)
            column, own = columns.columns(targets[rows], logits.shape[1])
            chosen = torch.where(own, scaled.gather(1, column[:, None]).squeeze(1), 0.0)
            top = columns.reduce(scaled.amax(dim=1), dist.ReduceOp.MAX)
            total = columns.reduce(scaled.sub_(top[:, None]).exp_().sum(dim=1), dist.ReduceOp.SUM)
            normalizer[rows] = top + total.log()
            taken[rows] = columns.reduce(chosen, dist.ReduceOp.SUM) - normalizer[rows]
        ctx.save_for_backward(logits, positions, targets, normalizer)
        ctx.temperature, ctx.columns, ctx.step = temperature, columns, step
        return taken

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        """d taken / d logits = (one_hot(target) - softmax) / temperature."""
        logits, positions, targets, normalizer = ctx.saved_tensors
        result = torch.zeros_like(logits)
        for start in range(0, len(positions), ctx.step):
            rows = slice(start, start + ctx.step)
            weight = gradients[0][rows, None] / ctx.temperature
            scaled = ctx.columns.scaled(logits[positions[rows]], ctx.temperature)
            slope = scaled.sub_(normalizer[rows, None]).exp_().mul_(-weight)
            column, own = ctx.columns.columns(targets[rows], logits.shape[1])
            slope.scatter_add_(1, column[:, None], weight * own[:, None])
            result[positions[rows]] = slope.to(logits.dtype)
        return result, None, None, None, None
