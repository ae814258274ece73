"""A critic's loss against hand-computed numbers."""

import math

import pytest
import torch
from torch import Tensor

from milepost.engines.loss_inputs import Denominators, count
from milepost.engines.value_loss import value_loss


def row(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


@pytest.mark.parametrize(
    ("value", "old", "loss", "clipped"),
    [(0.9, 0.5, 0.09, 1.0), (0.6, 0.5, 0.16, 0.0), (0.1, 0.5, 0.81, 0.0)],
)
def test_a_value_gains_nothing_past_the_clip(value: float, old: float, loss: float, clipped: float) -> None:
    one = Denominators(1, 1)
    outputs = value_loss(row(value), old_values=row(old), returns=row(1), loss_mask=row(1), denominators=one)
    assert float(outputs.loss) == pytest.approx(loss)
    assert float(outputs.metrics["value_loss"]) == pytest.approx(loss)
    assert float(outputs.metrics["value_clipfrac"]) == clipped


def test_past_the_clip_a_value_has_no_gradient_and_within_it_that_of_the_square() -> None:
    values = row(0.9, 0.6).requires_grad_()
    mask = row(1, 1)
    given = {"old_values": row(0.5, 0.5), "returns": row(1, 1), "loss_mask": mask, "denominators": count(mask)}
    value_loss(values, **given, aggregation="token_mean").loss.backward()
    assert values.grad is not None
    assert values.grad.tolist() == [[0.0, pytest.approx(2 * (0.6 - 1) / 2)]]


def test_masked_positions_are_not_read_and_a_split_changes_nothing() -> None:
    values, returns = torch.tensor([[0.9, math.nan], [0.2, 0.4]]), torch.tensor([[1.0, math.inf], [0.0, 1.0]])
    mask = torch.tensor([[1, 0], [1, 1]])

    def share(rows: slice) -> float:
        parts = {"old_values": values[rows] / 2, "returns": returns[rows], "loss_mask": mask[rows]}
        return float(value_loss(values[rows], **parts, denominators=count(mask)).loss)

    # 0.9 is kept to 0.65, 0.2 and 0.4 stay: ((1 - 0.65)^2 + (0.2^2 + 0.6^2) / 2) / 2
    assert share(slice(None)) == pytest.approx(share(slice(0, 1)) + share(slice(1, 2))) == pytest.approx(0.16125)


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match=r"returns has shape \(1, 1\), loss_mask \(1, 2\)"):
        value_loss(
            row(1, 2), old_values=row(1, 2), returns=row(1), loss_mask=row(1, 1), denominators=Denominators(1, 2)
        )
