"""Rules that stop a run, bounds that it tells of, and the best checkpoint: from stored numbers alone."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from milepost.flows.recipe import load_recipe
from milepost.storage.manifest import StepManifest
from milepost.storage.watched import AlertSection, Bound, StopSection
from milepost.tasks.watched import (
    History,
    Point,
    best_of,
    broken_rule,
    check_watched,
    crossings,
    gpu_seconds,
    plateau,
    seconds,
    tokens,
)

KL = "train/ppo_kl"


def step(number: int, attempt: int = 1, **metrics: float) -> StepManifest:
    named = {name.replace("__", "/"): value for name, value in metrics.items()}
    return StepManifest("r", number, "", "", "", "", {}, [], {}, named, attempt=attempt)


def history(*values: float, name: str = "train__ppo_kl") -> History:
    return History([step(number, **{name: value}) for number, value in enumerate(values)])


def rule(section: StopSection, found: History) -> str:
    broken = broken_rule(section, found)
    return broken.rule if broken else ""


def test_nothing_stops_a_run_that_has_no_rules() -> None:
    assert broken_rule(StopSection(), history(1e9, math.inf)) is None


def test_no_rule_is_looked_at_before_the_first_step() -> None:
    found = History([], {0: {"eval/sums/mean": 0.0}})
    assert broken_rule(StopSection(bounds=[Bound(metric="eval/sums/mean", below=1.0)]), found) is None


def test_a_bound_is_crossed_by_values_in_a_row_up_to_the_newest() -> None:
    section = StopSection(bounds=[Bound(metric=KL, above=0.2, in_a_row=2)])
    assert rule(section, history(0.3, 0.1, 0.3)) == ""
    assert rule(section, history(0.3, 0.2, 0.3)) == ""  # 0.2 is not above 0.2
    broken = broken_rule(section, history(0.1, 0.3, 0.4))
    assert broken and broken.reason == "train/ppo_kl is 0.4, which is above 0.2, 2 times in a row"
    assert rule(section, history(0.3, 0.4, 0.1)) == ""


def test_a_value_that_is_no_number_crosses_a_bound() -> None:
    assert rule(StopSection(bounds=[Bound(metric=KL, above=0.2)]), history(math.nan)) == "stop.bounds"


def test_a_bound_needs_a_side() -> None:
    with pytest.raises(ValueError, match="a bound on 'train/ppo_kl' needs above or below"):
        Bound(metric=KL)


def test_budgets_count_tokens_seconds_and_seconds_times_gpus_of_each_attempt() -> None:
    steps = [
        step(0, rollout__tokens=100, time__generate=2.0, time__optimize=3.0),
        step(1, attempt=2, rollout__tokens=50, time__generate=1.0, time__sync=0.5),
    ]
    found = History(steps, gpus={1: 1, 2: 4})
    assert (tokens(found), seconds(found), gpu_seconds(found)) == (150.0, 6.5, 5.0 + 6.0)
    assert rule(StopSection(max_tokens=151), found) == "" and rule(StopSection(max_tokens=150), found)
    assert rule(StopSection(max_seconds=6.5), found) == "stop.max_seconds"
    assert rule(StopSection(max_gpu_seconds=11.5), found) == ""


def test_what_is_used_up_is_told_in_numbers_that_say_so() -> None:
    found = History([step(0, time__generate=1.3125, rollout__tokens=1234567)])
    sections = StopSection(max_seconds=0.5), StopSection(max_tokens=1000000)
    assert [broken.reason for section in sections if (broken := broken_rule(section, found))] == [
        "1.312 of 0.5 seconds are used up",
        "1,234,567 of 1,000,000 generated tokens are used up",
    ]


@pytest.mark.parametrize(
    ("values", "options", "stops"),
    [
        ([0.1, 0.5, 0.4, 0.5], {}, True),  # equal is not better
        ([0.1, 0.5, 0.4], {}, False),
        ([0.1, 0.5, 0.4, 0.6], {}, False),
        ([0.5, 0.52, 0.54], {"plateau_improvement": 0.05}, True),
        ([0.5, 0.52, 0.56], {"plateau_improvement": 0.05}, False),  # against the best, not the one before
        ([3.0, 2.0, 2.5, 2.5], {"plateau_best_is": "lowest"}, True),
        ([3.0, 2.0, 1.0], {"plateau_best_is": "lowest"}, False),
        ([math.nan, math.nan], {}, True),
    ],
)
def test_a_plateau_is_patience_values_without_a_better_one(
    values: list[float], options: dict[str, Any], stops: bool
) -> None:
    section = StopSection(plateau_metric=KL, plateau_patience=2, **options)
    assert bool(plateau(section, [Point(at, value) for at, value in enumerate(values)])) == stops


def test_evaluations_count_up_to_the_step_where_the_run_is() -> None:
    held_out = {after: {"eval/sums/mean": value} for after, value in ((0, 0.5), (2, 0.4), (4, 0.3))}
    section = StopSection(plateau_metric="eval/sums/mean", plateau_patience=2)
    known = history(0.0, 0.0, 0.0, 0.0).steps
    assert rule(section, History(known[:3], held_out)) == ""
    assert rule(section, History(known, held_out)) == "stop.plateau_metric"


def test_an_alert_is_told_once_until_its_metric_has_come_back() -> None:
    section = AlertSection(bounds=[Bound(metric=KL, above=1.0, in_a_row=2)])
    values = [2.0, 2.0, 2.0, 0.0, 2.0, 2.0]
    told = [len(crossings(section, history(*values[: count + 1]))) for count in range(len(values))]
    assert told == [0, 1, 0, 0, 0, 1]


def test_an_alert_on_an_evaluation_is_told_at_the_step_of_it() -> None:
    section = AlertSection(bounds=[Bound(metric="eval/sums/mean", below=0.5)])
    held_out = {2: {"eval/sums/mean": 0.1}}
    known = history(0.0, 0.0, 0.0).steps
    assert [len(crossings(section, History(known[:count], held_out))) for count in (1, 2, 3)] == [0, 1, 0]


def test_an_alert_on_an_evaluation_that_ended_steps_later_is_told_then() -> None:
    section = AlertSection(bounds=[Bound(metric="eval/sums/mean", below=0.5), Bound(metric=KL, above=0.5)])
    known, held_out = history(1.0, 1.0, 0.0).steps, {2: {"eval/sums/mean": 0.1}}
    (found,) = crossings(section, History(known, held_out, late=frozenset([2])))
    assert found.point == Point(2, 0.1)


floats = st.floats(-5, 5) | st.just(math.nan)


@given(st.lists(floats, min_size=1, max_size=12), st.integers(1, 4), st.integers(1, 12))
def test_a_decision_depends_on_what_was_before_alone(values: list[float], row: int, count: int) -> None:
    section = StopSection(
        bounds=[Bound(metric=KL, above=1.0, below=-1.0, in_a_row=row)], plateau_metric=KL, plateau_patience=row
    )
    whole, part = history(*values), history(*values[:count])
    assert broken_rule(section, History(whole.steps[:count])) == broken_rule(section, part)


@given(st.lists(floats, max_size=12), st.integers(1, 4))
def test_alerts_are_as_many_as_stretches_beyond_the_bound(values: list[float], row: int) -> None:
    section = AlertSection(bounds=[Bound(metric=KL, above=1.0, in_a_row=row)])
    told = sum(len(crossings(section, history(*values[: count + 1]))) for count in range(len(values)))
    beyond = "".join("x" if math.isnan(value) or value > 1.0 else " " for value in values)
    assert told == sum(len(stretch) >= row for stretch in beyond.split())


def test_the_best_is_the_earliest_of_the_highest_or_lowest() -> None:
    values = {2: 0.5, 4: 0.7, 6: 0.7, 8: math.nan, 10: 0.1}
    assert best_of(values, "highest") == Point(4, 0.7) and best_of(values, "lowest") == Point(10, 0.1)
    assert best_of({8: math.nan}, "highest") is None


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ('stop.bounds=[{"metric":"kl","above":1}]', "stop.bounds has 'kl', which is no metric of this run"),
        ("stop.plateau_metric=eval/sums/mean", "evaluations have none: set eval.path and eval.every_steps"),
        ('alert.bounds=[{"metric":"eval/x/mean","below":1}]', "alert.bounds has 'eval/x/mean'"),
        ("checkpoint.best_metric=rollout/reward", "checkpoint.best_metric has 'rollout/reward'"),
    ],
)
def test_a_metric_that_a_run_cannot_have_is_refused(override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_watched(load_recipe(None, [override])[0])
    evaluated = ["eval.path=data/sums.jsonl", "eval.every_steps=2", "stop.plateau_metric=eval/sums/mean"]
    check_watched(load_recipe(None, [*evaluated, "checkpoint.best_metric=eval/sums/pass_at_1"])[0])
