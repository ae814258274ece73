"""The learning rate by hand, and as Megatron has it."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from milepost.engines.schedule import after_the_end, check_rates, check_schedule, learning_rate, shown
from milepost.flows.recipe import load_recipe
from milepost.storage.batch_plan import critic_optimizer, optimizer_steps, with_decay_steps
from milepost.storage.parameters import Parameters
from milepost.storage.training import OptimizerSection, as_stored

MEGATRONS = {"inverse_sqrt": "inverse-square-root", "wsd": "WSD"}


def section(schedule: str = "constant", **fields: Any) -> OptimizerSection:
    """From 0 to 1 in 10 steps and to 0.1 at step 110, if nothing else is said."""
    given = {"lr": 1.0, "warmup_steps": 10, "min_lr": 0.1, "decay_steps": 110, "schedule": schedule}
    return OptimizerSection.model_validate(given | fields)


@pytest.mark.parametrize(
    ("schedule", "halfway", "end", "after"),
    [
        ("constant", 1.0, 1.0, 1.0),
        ("linear", 0.55, 0.1, 0.1),
        ("cosine", 0.55, 0.1, 0.1),
        ("inverse_sqrt", 0.408248, 0.301511, 0.1),
    ],
)
def test_every_schedule_warms_up_and_falls_to_its_end(schedule: str, halfway: float, end: float, after: float) -> None:
    found = [learning_rate(step, section(schedule)) for step in (0, 5, 10, 60, 110, 111)]
    assert found == pytest.approx([0.0, 0.5, 1.0, halfway, end, after], abs=1e-6)


@pytest.mark.parametrize(
    ("style", "halfway"), [("linear", 0.5), ("cosine", 0.5), ("exponential", 0.414214), ("minus_sqrt", 0.292893)]
)
def test_wsd_stays_at_the_peak_and_decays_at_the_end(style: str, halfway: float) -> None:
    wsd = section("wsd", wsd_style=style, wsd_decay_steps=20, min_lr=0.0)
    found = [learning_rate(step, wsd) for step in (5, 10, 60, 90, 100, 110, 111)]
    assert found == pytest.approx([0.5, 1.0, 1.0, 1.0, halfway, 0.0, 0.0], abs=1e-6)


def test_warm_up_begins_where_it_is_told_to() -> None:
    assert [learning_rate(step, section(init_lr=0.5)) for step in (0, 5, 10)] == [0.5, 0.75, 1.0]
    assert learning_rate(0, section(warmup_steps=0)) == 1.0


@given(
    schedule=st.sampled_from(["constant", "linear", "cosine", "inverse_sqrt", "wsd"]),
    style=st.sampled_from(["linear", "cosine", "exponential", "minus_sqrt"]),
    warmup=st.integers(0, 40),
    decay=st.integers(1, 60),
    low=st.floats(0, 1),
    step=st.integers(0, 120),
)
def test_rates_are_those_of_megatron(schedule: str, style: str, warmup: int, decay: int, low: float, step: int) -> None:
    parameter = torch.optim.Adam([torch.zeros(1)])
    scheduler = OptimizerParamScheduler(
        parameter,
        init_lr=low / 2,
        max_lr=1.0,
        min_lr=low,
        lr_warmup_steps=warmup,
        lr_decay_steps=100,
        lr_decay_style=MEGATRONS.get(schedule, schedule),
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=0,
        wd_incr_style="constant",
        wsd_decay_steps=decay,
        lr_wsd_decay_style=style,
    )
    scheduler.step(step)
    own = {"wsd_style": style, "wsd_decay_steps": decay, "min_lr": low, "init_lr": low / 2, "decay_steps": 100}
    found = learning_rate(step, section(schedule, warmup_steps=warmup, **own))
    assert found == pytest.approx(parameter.param_groups[0]["lr"], abs=1e-12)


def test_a_schedule_ends_with_the_run_unless_it_is_told_when() -> None:
    assert section("cosine", decay_steps=None).ending_at(30).decay_steps == 30
    assert section("cosine").ending_at(30).decay_steps == 110
    assert section(decay_steps=None).ending_at(30).decay_steps is None
    with pytest.raises(ValueError, match="'cosine' has no end: set optimizer.decay_steps"):
        learning_rate(50, section("cosine", decay_steps=None))


def test_a_run_that_is_given_more_steps_is_told_of_their_rate() -> None:
    told = after_the_end(section("linear"), 150)
    assert "ends at optimizer step 110, and those after it, up to 150, are taken at optimizer.min_lr 0.1" in told
    assert not after_the_end(section("linear"), 110) and not after_the_end(section(), 150)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"min_lr": 2.0}, r"min_lr 2 is more than optimizer.lr 1: lower it"),
        ({"init_lr": 2.0}, r"init_lr 2 is more than optimizer.lr 1: lower it"),
        ({"schedule": "cosine", "warmup_steps": 110}, "warmup_steps 110 leaves nothing to decay: 'cosine' ends at"),
        ({"schedule": "wsd"}, "needs optimizer.wsd_decay_steps"),
        ({"schedule": "wsd", "wsd_decay_steps": 101}, "wsd_decay_steps 101 do not fit: 100 optimizer steps are left"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        check_schedule(section(**fields))


def test_a_negative_step_is_refused() -> None:
    with pytest.raises(ValueError, match="optimizer step is -1"):
        learning_rate(-1, OptimizerSection())


def test_what_was_said_in_other_words_means_what_it_meant() -> None:
    """`warmup` was a schedule of its own, and `constant` went without."""
    old = section("warmup")
    assert (old.schedule, old.warmup_steps, learning_rate(5, old)) == ("constant", 10, 0.5)
    assert as_stored({"schedule": "constant", "warmup_steps": 10}) == {"schedule": "constant", "warmup_steps": 0}
    for kept in ({"schedule": "warmup", "warmup_steps": 10}, section().model_dump()):
        assert as_stored(kept) == kept


def test_a_schedule_is_told_in_words() -> None:
    assert shown(OptimizerSection(lr=1e-6)) == "1e-06, constant"
    assert shown(section("cosine")) == "0 to 1 in 10 optimizer steps, then cosine until 110, then 0.1"
    assert "wsd with the last 20 for its decay until 110" in shown(section("wsd", wsd_decay_steps=20))


def with_critic(*overrides: str) -> Parameters:
    knobs = ["data.rollout_batch_size=4", "data.n_samples_per_prompt=1", "algorithm.num_steps_per_rollout=2"]
    told = ["algorithm.advantage=gae", "optimizer.schedule=linear", "optimizer.lr=1e-6", "optimizer.min_lr=1e-7"]
    return load_recipe(None, [*knobs, *told, "critic.pretrain_steps=3", *overrides])[0]


def test_a_critic_has_its_own_peak_and_warm_up_and_comes_to_its_end_with_the_policy() -> None:
    chosen = with_decay_steps(with_critic("critic.warmup_steps=4"), 10)
    policy, critic = chosen.optimizer, critic_optimizer(chosen)
    assert (optimizer_steps(chosen, 10), policy.decay_steps, critic.decay_steps) == (14, 14, 20)
    assert [learning_rate(step, critic) for step in (0, 4, 20)] == pytest.approx([0.0, 1e-5, 1e-6])
    assert [learning_rate(step, policy) for step in (0, 14)] == pytest.approx([1e-6, 1e-7])


def test_a_warm_up_of_the_critic_that_leaves_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="critic.warmup_steps 30 leaves nothing to decay: 'linear' ends at .* 20"):
        check_rates(with_decay_steps(with_critic("critic.warmup_steps=30"), 10))
