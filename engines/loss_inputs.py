"""What a loss is given and gives back, and how token values become one number.

Denominators are global over the optimizer batch, so losses and metrics are additive shares: summed over micro-batches
and ranks they are the values of the whole batch, however it was split. A masked position is read by nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Denominators:
    """Samples with a trained token, and trained tokens, in the whole optimizer batch: all micro-batches, all ranks."""

    samples: float
    tokens: float


@dataclass(frozen=True)
class LossInputs:
    """One micro-batch of whole samples, `[batch, time]`. `loss_mask` is 1 where a token is trained.

    `logprobs` carries the gradient, and so does `entropy`, that of the distribution each token was taken from, which
    is there when it was asked for. `importance_weights` are constants; 0 is a token that is not learnt from.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    rollout_logprobs: Tensor | None
    ref_logprobs: Tensor | None
    advantages: Tensor
    loss_mask: Tensor
    denominators: Denominators
    importance_weights: Tensor | None = None
    entropy: Tensor | None = None


@dataclass(frozen=True)
class LossOutputs:
    """The micro-batch's share of the batch loss, and its shares of the batch's means."""

    loss: Tensor
    metrics: dict[str, Tensor]


Loss = Callable[[LossInputs, Mapping[str, Any]], LossOutputs]


def count(loss_mask: Tensor | Sequence[Any]) -> Denominators:
    """The denominators of a batch: of a padded mask `[batch, time]`, or of one mask per sample (lists or tensors)."""
    trained = [int(torch.count_nonzero(torch.as_tensor(row))) for row in loss_mask]
    return Denominators(samples=float(sum(tokens > 0 for tokens in trained)), tokens=float(sum(trained)))


def clean(mask: Tensor, tensor: Tensor) -> Tensor:
    """`tensor` in float32 or better, zero where masked: `where`, because a product would keep NaN and infinity."""
    wide = tensor if tensor.dtype == torch.float64 else tensor.float()
    return torch.where(mask, wide, torch.zeros_like(wide))


def checked_mask(loss_mask: Tensor, **tensors: Tensor) -> Tensor:
    """`loss_mask` as booleans; ValueError unless it and all `tensors` are of one shape `[batch, time]`."""
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        if shape != tuple(loss_mask.shape) or len(shape) != 2:
            raise ValueError(
                f"{name} has shape {shape}, loss_mask {tuple(loss_mask.shape)}: both must be the same [batch, time]"
            )
    return loss_mask.bool()


def row_tokens(mask: Tensor) -> Tensor:
    """Trained tokens of each sample, `[batch, 1]`, at least 1."""
    return mask.sum(dim=1, keepdim=True).clamp(min=1)


def aggregate(
    values: Tensor, mask: Tensor, denominators: Denominators, *, aggregation: str, max_length: int | None = None
) -> Tensor:
    """The micro-batch's share of the batch's one number."""
    values = clean(mask, values)
    if aggregation == "token_mean":
        return values.sum() / max(denominators.tokens, 1.0)
    if aggregation == "constant":
        return values.sum() / (max(denominators.samples, 1.0) * float(max_length or 1))
    return (values / row_tokens(mask)).sum() / max(denominators.samples, 1.0)
