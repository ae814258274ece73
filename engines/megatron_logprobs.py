"""Log-probabilities of taken tokens from logits that are split over tensor-parallel ranks by vocabulary.

In float32, without a float32 copy of all logits: a chunk of rows at a time, or in compiled kernels that need none.
Every row is worked on where it lies, because picking rows out of the logits would copy them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_FLOOR = torch.finfo(torch.float32).min


@dataclass(frozen=True)
class VocabSlice:
    """This rank's columns of the logits: `first` and on of `vocab`; columns past `vocab` are padding."""

    vocab: int
    first: int = 0
    group: Any = None  # process group of the ranks with the other columns
    compiled: bool = False
    chunk_elements: int = 1 << 24  # float32 logits in flight when not compiled: 64 MiB

    def local(self, targets: Tensor, width: int) -> Tensor:
        """The local column of each target, -1 for one that another rank has."""
        column = targets - self.first
        return torch.where((column >= 0) & (column < width), column, -1)

    def reduce(self, tensor: Tensor, operation: Any) -> Tensor:
        if self.group is not None and self.group.size() > 1:
            dist.all_reduce(tensor, operation, group=self.group)
        return tensor

    def by_rows(self, function: Callable[..., Tensor], logits: Tensor, *rows: Tensor, **constants: Any) -> Tensor:
        """`function(logits, *rows)`, in chunks of rows unless it is compiled."""
        constants["valid"] = min(max(self.vocab - self.first, 0), logits.shape[1])
        if self.compiled:
            return _compiled(function)(logits, *rows, **constants)
        step = max(1, self.chunk_elements // logits.shape[1])
        parts = zip(logits.split(step), *(row.split(step) for row in rows), strict=True)
        return torch.cat([function(*part, **constants) for part in parts])


@cache
def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(function)


def _scaled(logits: Tensor, temperature: float, valid: int) -> Tensor:
    """Float32 `logits` over `temperature`, with padding columns at minus infinity."""
    scaled = logits.float() / temperature
    if valid == logits.shape[1]:
        return scaled
    return torch.where(torch.arange(logits.shape[1], device=logits.device) < valid, scaled, -torch.inf)


def _sums(logits: Tensor, column: Tensor, *, temperature: float, valid: int) -> Tensor:
    """Of each row the largest logit, the sum of exponentials over it, and the logit of `column` (0 when -1): [n, 3]."""
    scaled = _scaled(logits, temperature, valid)
    top = scaled.amax(dim=1).clamp(min=_FLOOR)
    total = (scaled - top[:, None]).exp().sum(dim=1)
    chosen = logits.gather(1, column.clamp(min=0)[:, None]).squeeze(1).float() / temperature
    return torch.stack([top, total, torch.where(column < 0, 0.0, chosen)], dim=1)


def _slopes(
    logits: Tensor, column: Tensor, normalizer: Tensor, weight: Tensor, *, temperature: float, valid: int
) -> Tensor:
    """weight * (one_hot(column) - softmax), of each row, in the type of `logits`."""
    softmax = (_scaled(logits, temperature, valid) - normalizer[:, None]).exp()
    own = torch.arange(logits.shape[1], device=logits.device) == column[:, None]
    return (weight[:, None] * (own.float() - softmax)).to(logits.dtype)


def taken_logprobs(
    logits: Tensor, positions: Tensor, targets: Tensor, *, temperature: float, columns: VocabSlice
) -> Tensor:
    """log_softmax(logits[positions] / temperature) of `targets`, float32 `[n]`, with gradient.

    `logits` is `[tokens, local vocabulary]`; `positions` are distinct rows of it, `targets` token ids.
    """
    rows = targets.new_full((logits.shape[0],), -1).index_copy(0, positions, columns.local(targets, logits.shape[1]))
    result: Tensor = _TakenLogprobs.apply(logits, rows, temperature, columns)
    return result[positions]


class _TakenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, column: Tensor, temperature: float, columns: VocabSlice) -> Tensor:
        own_top, total, chosen = columns.by_rows(_sums, logits, column, temperature=temperature).unbind(dim=1)
        top = columns.reduce(own_top.clone(), dist.ReduceOp.MAX)
        total = columns.reduce(total * (own_top - top).exp(), dist.ReduceOp.SUM)
        normalizer = top + total.log()
        ctx.save_for_backward(logits, column, normalizer)
        ctx.temperature, ctx.columns = temperature, columns
        return columns.reduce(chosen.clone(), dist.ReduceOp.SUM) - normalizer

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        """d taken / d logits = (one_hot(target) - softmax) / temperature; rows that are not asked for have weight 0."""
        logits, column, normalizer = ctx.saved_tensors
        weight = gradients[0] / ctx.temperature
        slopes = ctx.columns.by_rows(_slopes, logits, column, normalizer, weight, temperature=ctx.temperature)
        return slopes, None, None, None
