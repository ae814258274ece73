"""Accuracy and its interval."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from milepost.storage.parameters import EvalSet, Parameters, RewardSection
from milepost.storage.provenance import provenance
from milepost.storage.runs import RunRecord
from milepost.tasks.evaluate import greedy, set_plan, set_plans
from milepost.tasks.intervals import wilson
from milepost.tasks.sampling import Sampling


def test_the_interval_of_half_of_ten_is_wilsons() -> None:
    found = wilson(0.5, 10)
    assert (found.low, found.high) == (pytest.approx(0.236593, abs=1e-6), pytest.approx(0.763407, abs=1e-6))


def test_the_interval_of_none_of_five_does_not_end_at_zero() -> None:
    found = wilson(0.0, 5)
    assert found.low == 0.0 and found.high == pytest.approx(0.434482, abs=1e-6)


def test_no_prompt_says_nothing() -> None:
    found = wilson(math.nan, 0)
    assert (found.low, found.high, found.count) == (0.0, 1.0, 0) and math.isnan(found.mean)


@given(st.floats(0, 1), st.integers(1, 10_000))
def test_the_interval_holds_the_mean_and_stays_in_the_unit_interval(mean: float, count: int) -> None:
    found = wilson(mean, count)
    assert 0 <= found.low <= mean + 1e-12 and mean - 1e-12 <= found.high <= 1


def test_greedy_keeps_lengths_and_stops_and_takes_one_sample() -> None:
    params = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "max_new_tokens": 8, "stop": ["\n"]}
    found = greedy(Sampling("single_turn", params, 16, 64, 3))
    assert found.n_samples_per_prompt == 1
    assert found.params == {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 8, "stop": ["\n"]}


def test_a_greedy_set_is_identified_as_it_was_before_there_were_several() -> None:
    """Runs that were evaluated before go on: what they stored is found under the key of that time."""
    found = set_plan(0, EvalSet(path="held.jsonl", name="held"), Parameters())
    params = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 256}
    reward = RewardSection().model_dump(mode="json")
    assert found.config("1-abc") == {"params": params, "reward": reward, "weight_version": "1-abc"}


def test_a_set_has_sampling_and_reward_of_its_own() -> None:
    own = {"n_samples_per_prompt": 4, "temperature": 0.6, "max_new_tokens": 9, "reward": "exact"}
    found = set_plan(1, EvalSet(path="held.jsonl", name="held", **own), Parameters())
    assert (found.sampling.n_samples_per_prompt, found.sampling.params["temperature"]) == (4, 0.6)
    assert (found.sampling.params["max_new_tokens"], found.reward.name, found.shards(65)) == (9, "exact", 2)


def test_ids_of_an_evaluation_are_held_against_the_models_vocabulary_like_those_of_training() -> None:
    model = {"folder": "model", "config": {"vocab_size": 19}}
    record = RunRecord("run", 1, Parameters(), "", provenance(), {}, model)
    sets = [EvalSet(path="a.jsonl", name="a"), EvalSet(path="b.jsonl", name="b", temperature=0.5)]
    plans = set_plans(sets, record.parameters, record)
    assert [plan.sampling.vocabulary for plan in plans] == [19, 19]
    assert not any("vocabulary" in plan.sampling.identity() for plan in plans)  # what was stored before is found
