"""The learning rate by hand."""

import pytest

from milepost.engines.schedule import learning_rate
from milepost.storage.training import OptimizerSection


@pytest.mark.parametrize(("step", "rate"), [(0, 0.0), (1, 0.1), (5, 0.5), (9, 0.9), (10, 1.0), (1000, 1.0)])
def test_warm_up_is_linear_from_zero(step: int, rate: float) -> None:
    optimizer = OptimizerSection(lr=1.0, schedule="warmup", warmup_steps=10)
    assert learning_rate(step, optimizer) == pytest.approx(rate)


def test_without_warm_up_the_rate_is_the_peak() -> None:
    assert learning_rate(0, OptimizerSection(lr=3e-6, warmup_steps=10)) == 3e-6
    assert learning_rate(0, OptimizerSection(lr=3e-6, schedule="warmup", warmup_steps=0)) == 3e-6


def test_a_negative_step_is_refused() -> None:
    with pytest.raises(ValueError, match="optimizer step is -1"):
        learning_rate(-1, OptimizerSection())
