"""Log-probabilities of taken tokens and entropies, from hidden states and an output layer split by vocabulary.

Only rows that predict a taken token have logits, a chunk of them at a time, and in float32 no more than a part of a
chunk. The backward pass makes them again in place of keeping them: four products of the output layer instead of three,
for memory that does not grow with the micro-batch. Of rows that fit one chunk they are kept, and nothing is made twice.
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
class OutputLayer:
    """This rank's tokens of the output layer: `first` and on of `vocab`; rows of `weight` past those are padding.

    Its gradient is added to `weight.main_grad`, where Megatron sums gradients up in float32.
    """

    weight: Tensor  # [local vocabulary, hidden]
    vocab: int
    first: int = 0
    group: Any = None  # process group of the ranks with the other tokens
    compiled: bool = False
    chunk_bytes: int = 1 << 26  # of logits at once, in the type of the weight
    float_elements: int = 1 << 24  # of them in float32 when not compiled: 64 MiB

    def chunks(self, rows: int) -> list[slice]:
        step = max(1, self.chunk_bytes // (len(self.weight) * self.weight.element_size()))
        return [slice(start, start + step) for start in range(0, rows, step)]

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.weight.t()

    def add_gradient(self, slopes: Tensor, hidden: Tensor) -> None:
        """Add to the gradient of the weight what the `slopes` of the logits of `hidden` give."""
        whole: Tensor = self.weight.main_grad
        if whole.dtype == slopes.dtype:
            whole.addmm_(slopes.t(), hidden)
        else:
            whole.add_(slopes.t() @ hidden)

    def local(self, targets: Tensor) -> Tensor:
        """The local row of each target, -1 for one that another rank has."""
        row = targets - self.first
        return torch.where((row >= 0) & (row < len(self.weight)), row, -1)

    def reduce(self, tensor: Tensor, operation: Any) -> Tensor:
        if self.group is not None and self.group.size() > 1 and tensor.numel():
            dist.all_reduce(tensor, operation, group=self.group)
        return tensor

    def by_rows(self, function: Callable[..., Tensor], logits: Tensor, *rows: Tensor, **constants: Any) -> Tensor:
        """`function(logits, *rows)`, in parts of rows unless it is compiled."""
        constants["valid"] = min(max(self.vocab - self.first, 0), logits.shape[1])
        if self.compiled:
            return _compiled(function)(logits, *rows, **constants)
        step = max(1, self.float_elements // logits.shape[1])
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
    hidden: Tensor, positions: Tensor, targets: Tensor, *, temperature: float, layer: OutputLayer
) -> Tensor:
    """log_softmax(logits / temperature) of `targets` at `positions`, float32 `[n]`, with gradient.

    `hidden` is `[tokens, hidden]`; `positions` are distinct rows of it, `targets` token ids.
    """
    found: Tensor = _TakenLogprobs.apply(hidden, positions, targets, temperature, layer, False)[0]
    return found


def taken_logprobs_and_entropy(
    hidden: Tensor, positions: Tensor, targets: Tensor, *, temperature: float, layer: OutputLayer
) -> tuple[Tensor, Tensor]:
    """`taken_logprobs`, and the entropy in nats of the distributions that the targets were taken from, alike."""
    logprobs, entropy = _TakenLogprobs.apply(hidden, positions, targets, temperature, layer, True)
    return logprobs, entropy


class _TakenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        positions: Tensor,
        targets: Tensor,
        temperature: float,
        layer: OutputLayer,
        entropy: bool,
    ) -> tuple[Tensor, ...]:
        column, chunks, kept = layer.local(targets), layer.chunks(len(positions)), None
        sums = torch.empty(len(positions), 3 + entropy, device=hidden.device)
        for rows in chunks:
            logits = layer.logits(hidden[positions[rows]])
            sums[rows] = layer.by_rows(_sums, logits, column[rows], temperature=temperature, entropy=entropy)
            kept = logits if len(chunks) == 1 else None
            del logits  # before the next are made
        own_top, own_total, own_chosen, *own_moment = sums.unbind(dim=1)
        top = layer.reduce(own_top.clone(), dist.ReduceOp.MAX)
        lower = own_top - top
        shares = [own_total * lower.exp(), own_chosen]
        shares += [(moment + own_total * lower) * lower.exp() for moment in own_moment]
        total, chosen, *moment = layer.reduce(torch.stack(shares), dist.ReduceOp.SUM).unbind()
        normalizer = top + total.log()
        found = [chosen - normalizer, *(total.log() - below / total for below in moment)]
        ctx.save_for_backward(hidden, positions, kept, column, normalizer, *found[1:])
        ctx.temperature, ctx.layer = temperature, layer
        ctx.set_materialize_grads(False)
        return tuple(found)

    @staticmethod
    def backward(
        ctx: Any, gradient: Tensor | None, entropy_gradient: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        """d taken / d logits = (one_hot(target) - softmax) / temperature, a chunk of rows at a time."""
        hidden, positions, kept, column, normalizer, *entropy = ctx.saved_tensors
        layer: OutputLayer = ctx.layer
        weight = torch.zeros_like(normalizer) if gradient is None else gradient / ctx.temperature
        given = [column, normalizer, weight]
        if entropy_gradient is not None:
            given += [*entropy, entropy_gradient / ctx.temperature]
        back = torch.zeros_like(hidden)
        for rows in layer.chunks(len(positions)):
            own = hidden[positions[rows]]
            logits = layer.logits(own) if kept is None else kept
            slopes = layer.by_rows(_slopes, logits, *(part[rows] for part in given), temperature=ctx.temperature)
            del logits
            back.index_copy_(0, positions[rows], slopes @ layer.weight)
            layer.add_gradient(slopes, own)
            del slopes
        return back, None, None, None, None, None
