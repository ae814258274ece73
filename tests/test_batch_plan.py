"""The four knobs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from milepost.storage.batch_plan import BatchPlan, solve

sizes = st.integers(1, 512)


def test_any_three_give_the_fourth() -> None:
    full = BatchPlan(32, 8, 64, 4)
    assert solve(None, 8, 64, 4) == full
    assert solve(32, None, 64, 4) == full
    assert solve(32, 8, None, 4) == full
    assert solve(32, 8, 64, None) == full


@given(sizes, sizes, sizes)
def test_a_solution_always_holds_the_invariant(batch: int, group: int, steps: int) -> None:
    try:
        plan = solve(batch, group, num_steps_per_rollout=steps)
    except ValueError:
        assert batch * group % steps
        return
    assert plan.rollout_batch_size * plan.n_samples_per_prompt == plan.global_batch_size * plan.num_steps_per_rollout


def test_four_that_do_not_fit_are_refused_with_both_products() -> None:
    with pytest.raises(ValueError, match=r"= 256, but .* = 200"):
        solve(32, 8, 200, 1)


def test_a_fourth_is_never_rounded() -> None:
    with pytest.raises(ValueError, match=r"256 is not a multiple of global_batch_size = 200"):
        solve(32, 8, 200)


def test_two_are_too_few() -> None:
    with pytest.raises(ValueError, match="global_batch_size and num_steps_per_rollout are not set"):
        solve(32, 8)


@pytest.mark.parametrize("value", [0, -1, True, 2.5, "8"])
def test_what_is_not_a_positive_whole_number_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="n_samples_per_prompt is .*whole number"):
        solve(32, value, 64, 4)  # type: ignore[arg-type]
