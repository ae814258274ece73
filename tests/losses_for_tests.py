"""A loss that is not built in."""

from collections.abc import Mapping
from typing import Any

from milepost.engines.loss_inputs import LossInputs, LossOutputs, aggregate


def squared(inputs: LossInputs, params: Mapping[str, Any]) -> LossOutputs:
    """`factor` times the squared log-probabilities."""
    mask = inputs.loss_mask.bool()
    loss = aggregate(inputs.logprobs**2, mask, inputs.denominators, aggregation=params["aggregation"])
    return LossOutputs(params["factor"] * loss, {"squared": loss.detach()})
