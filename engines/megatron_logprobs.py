"""Log-probabilities of taken tokens and entropies, from logits that tensor-parallel ranks have by vocabulary.

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
        first, *others = zip(logits.split(step), *(row.split(step) for row in rows), strict=True)
        found = function(*first, **constants)
        if not others:
            return found
        whole = found.new_empty(len(logits), *found.shape[1:])  # filled as they come: joined, they would be there twice
        whole[:step] = found
        for index, part in enumerate(others, 1):
            whole[index * step : (index + 1) * step] = function(*part, **constants)
        return whole


@cache
def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(function)


def _scaled(logits: Tensor, temperature: float, valid: int) -> Tensor:
    """Float32 `logits` over `temperature`, with padding columns at minus infinity."""
    scaled = logits.float() / temperature
    if valid == logits.shape[1]:
        return scaled
    return torch.where(torch.arange(logits.shape[1], device=logits.device) < valid, scaled, -torch.inf)


def _sums(logits: Tensor, column: Tensor, *, temperature: float, valid: int, entropy: bool) -> Tensor:
    """Of each row the largest logit, the sum of exponentials over it, and the logit of `column` (0 when -1): [n, 3].

    With `entropy` a fourth: the sum of exponentials times what they are of.
    """
    scaled = _scaled(logits, temperature, valid)
    top = scaled.amax(dim=1).clamp(min=_FLOOR)
    below = scaled - top[:, None]
    powers = below.exp()
    chosen = logits.gather(1, column.clamp(min=0)[:, None]).squeeze(1).float() / temperature
    found = [top, powers.sum(dim=1), torch.where(column < 0, 0.0, chosen)]
    if entropy:
        found.append((powers * below.clamp(min=_FLOOR)).sum(dim=1))  # padding: zero times the floor, not an infinity
    return torch.stack(found, dim=1)


def _slopes(
    logits: Tensor,
    column: Tensor,
    normalizer: Tensor,
    weight: Tensor,
    entropy: Tensor | None = None,
    entropy_weight: Tensor | None = None,
    *,
    temperature: float,
    valid: int,
) -> Tensor:
    """weight * (one_hot(column) - softmax) - entropy_weight * softmax * (log_softmax + entropy), as `logits` are."""
    log_softmax = _scaled(logits, temperature, valid) - normalizer[:, None]
    softmax = log_softmax.exp()
    own = torch.arange(logits.shape[1], device=logits.device) == column[:, None]
    slopes = weight[:, None] * (own.float() - softmax)
    if entropy is not None and entropy_weight is not None:
        slopes = slopes - entropy_weight[:, None] * softmax * (log_softmax.clamp(min=_FLOOR) + entropy[:, None])
    return slopes.to(logits.dtype)


def taken_logprobs(
    logits: Tensor, positions: Tensor, targets: Tensor, *, temperature: float, columns: VocabSlice
) -> Tensor:
    """log_softmax(logits[positions] / temperature) of `targets`, float32 `[n]`, with gradient.

    `logits` is `[tokens, local vocabulary]`; `positions` are distinct rows of it, `targets` token ids.
    """
    return _taken(logits, positions, targets, temperature, columns, False)[0]


def taken_logprobs_and_entropy(
    logits: Tensor, positions: Tensor, targets: Tensor, *, temperature: float, columns: VocabSlice
) -> tuple[Tensor, Tensor]:
    """`taken_logprobs`, and the entropy in nats of the distributions that the targets were taken from, alike."""
    logprobs, entropy = _taken(logits, positions, targets, temperature, columns, True)
    return logprobs, entropy


def _taken(
    logits: Tensor, positions: Tensor, targets: Tensor, temperature: float, columns: VocabSlice, entropy: bool
) -> list[Tensor]:
    rows = targets.new_full((logits.shape[0],), -1).index_copy(0, positions, columns.local(targets, logits.shape[1]))
    found: tuple[Tensor, ...] = _TakenLogprobs.apply(logits, rows, temperature, columns, entropy)
    return [values[positions] for values in found]


class _TakenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, column: Tensor, temperature: float, columns: VocabSlice, entropy: bool
    ) -> tuple[Tensor, ...]:
        sums = columns.by_rows(_sums, logits, column, temperature=temperature, entropy=entropy)
        own_top, own_total, own_chosen, *own_moment = sums.unbind(dim=1)
        top = columns.reduce(own_top.clone(), dist.ReduceOp.MAX)
        lower = own_top - top
        shares = [own_total * lower.exp(), own_chosen]
        shares += [(moment + own_total * lower) * lower.exp() for moment in own_moment]
        total, chosen, *moment = columns.reduce(torch.stack(shares), dist.ReduceOp.SUM).unbind()
        normalizer = top + total.log()
        found = [chosen - normalizer, *(total.log() - below / total for below in moment)]
        ctx.save_for_backward(logits, column, normalizer, *found[1:])
        ctx.temperature, ctx.columns = temperature, columns
        ctx.set_materialize_grads(False)
        return tuple(found)

    @staticmethod
    def backward(
        ctx: Any, gradient: Tensor | None, entropy_gradient: Tensor | None = None
    ) -> tuple[Tensor, None, None, None, None]:
        """d taken / d logits = (one_hot(target) - softmax) / temperature; rows that are not asked for have weight 0."""
        logits, column, normalizer, *entropy = ctx.saved_tensors
        weight = torch.zeros_like(normalizer) if gradient is None else gradient / ctx.temperature
        rows = [column, normalizer, weight]
        if entropy_gradient is not None:
            rows += [*entropy, entropy_gradient / ctx.temperature]
        return ctx.columns.by_rows(_slopes, logits, *rows, temperature=ctx.temperature), None, None, None, None
