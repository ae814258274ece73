"""The loss of a critic: how far its values are from the returns, clipped around the values it began the step with."""

import torch
from torch import Tensor

from milepost.engines.loss_inputs import Denominators, LossOutputs, aggregate, checked_mask, clean


def value_loss(
    values: Tensor,
    *,
    old_values: Tensor,
    returns: Tensor,
    loss_mask: Tensor,
    denominators: Denominators,
    value_clip: float = 0.2,
    aggregation: str = "sample_mean",
    max_length: int | None = None,
) -> LossOutputs:
    """The larger of the squared errors of `values` and of `values` kept within `value_clip` of `old_values`.

    There is no factor of one half: a critic has a learning rate of its own.
    """
    mask = checked_mask(loss_mask, values=values, old_values=old_values, returns=returns)
    values, old = clean(mask, values), clean(mask, old_values).detach()
    wanted = clean(mask, returns).detach()
    free = (values - wanted) ** 2
    moved = values - old
    clipped = (old + moved.clamp(-value_clip, value_clip) - wanted) ** 2
    loss = torch.maximum(free, clipped)
    total = aggregate(loss, mask, denominators, aggregation=aggregation, max_length=max_length)
    is_clipped = (moved.abs() > value_clip) & (clipped > free)  # within the bounds only rounding tells the two apart
    share = clean(mask, is_clipped.to(loss.dtype)).sum() / max(denominators.tokens, 1.0)
    return LossOutputs(total, {"value_loss": total.detach(), "value_clipfrac": share})
