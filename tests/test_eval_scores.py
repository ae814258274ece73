"""Intervals, pass@k and majority vote, against values worked out by hand and by counting."""

import itertools
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from milepost.storage.parameters import EvalSet
from milepost.storage.schema import ROLLOUTS, from_rows
from milepost.tasks.eval_scores import Item, majority, pass_at_k, set_score, vote
from milepost.tasks.intervals import mean_interval, standard_error, wilson

COUNTS = st.integers(1, 12).flatmap(
    lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n)),
)


@pytest.mark.parametrize(
    ("n", "c", "k", "rate"),
    [(5, 2, 1, 0.4), (5, 2, 2, 0.7), (5, 0, 3, 0.0), (5, 5, 1, 1.0), (4, 1, 4, 1.0), (10, 3, 5, 1 - 21 / 252)],
)
def test_pass_at_k_is_one_minus_the_chance_to_draw_only_wrong_samples(n: int, c: int, k: int, rate: float) -> None:
    assert pass_at_k(n, c, k) == pytest.approx(rate, abs=1e-12)


@given(COUNTS)
def test_pass_at_k_is_the_share_of_subsets_that_hold_a_right_sample(counts: tuple[int, int, int]) -> None:
    n, c, k = counts
    subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


def test_pass_at_k_of_very_many_samples_is_a_number() -> None:
    assert pass_at_k(100_000, 1, 1000) == pytest.approx(0.01, abs=1e-9)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 1, 5), (4, 1, 0), (4, 5, 1)])
def test_pass_at_k_of_more_samples_than_there_are_is_refused(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"pass@{k} cannot be told from {n} samples of which {c} are right"):
        pass_at_k(n, c, k)


def test_the_standard_error_is_clustered_by_prompt() -> None:
    """Two prompts of two samples, (1, 1) and (0, 1): the sums of deviations from 0.75 are 0.5 and -0.5."""
    assert standard_error([[1, 1], [0, 1]], 0.75) == pytest.approx(math.sqrt(0.5) / 4)


def test_samples_that_agree_within_a_prompt_count_as_one() -> None:
    found = mean_interval([[1.0] * 8, [0.0] * 8, [1.0] * 8, [0.0] * 8])
    alone = wilson(0.5, 4)
    assert (found.mean, found.low, found.high, found.count) == (0.5, alone.low, alone.high, 4)


def test_one_score_a_prompt_has_wilsons_interval_as_it_is() -> None:
    found = mean_interval([[1.0]] * 5 + [[0.0]] * 5)
    assert (found.low, found.high) == (pytest.approx(0.236593, abs=1e-6), pytest.approx(0.763407, abs=1e-6))


def test_scores_beyond_the_unit_interval_have_a_symmetric_interval() -> None:
    found = mean_interval([[-1.0], [1.0], [1.0], [1.0]])
    assert found.mean == 0.5 and found.high - 0.5 == pytest.approx(1.959964 * math.sqrt(3) / 4, abs=1e-6)
    assert 0.5 - found.low == pytest.approx(found.high - 0.5)


@given(st.lists(st.lists(st.sampled_from([0.0, 1.0]), max_size=5), min_size=1, max_size=20))
def test_the_interval_holds_the_mean_and_never_claims_more_scores_than_there_are(groups: list[list[float]]) -> None:
    found, count = mean_interval(groups), sum(map(len, groups))
    if not count:
        assert math.isnan(found.mean) and (found.low, found.high) == (0.0, 1.0)
        return
    most = wilson(found.mean, count)
    assert found.low - 1e-9 <= found.mean <= found.high + 1e-9
    assert found.high - found.low >= most.high - most.low - 1e-9


def test_the_commonest_answer_wins_and_of_equally_common_ones_the_first() -> None:
    assert vote(["7", "8", "8"]) == 1
    assert vote(["7", "8", "8", "7"]) == 0


def test_the_majority_is_right_where_the_winning_answer_is() -> None:
    right = Item("a", "a", [0.0, 1.0, 1.0], ["7", "8", "8"])
    wrong = Item("b", "b", [1.0, 0.0, 0.0], ["8", "7", "7"])
    unscored = Item("c", "c", [None, None, 1.0], ["7", "7", "8"])
    assert majority([right, wrong, unscored], 1.0) == pytest.approx(1 / 3)


def sample(
    group: str, index: int, reward: float | None, response: str, *, status: str = "completed"
) -> dict[str, object]:
    ids = list(range(len(response)))
    texts = {"prompt": '"p"', "label": "null", "sampling": "{}", "metadata": "{}"}
    found = {
        "run_id": "e",
        "step": 0,
        "shard": 0,
        "group_id": group,
        "sample_id": f"{group}-{index}",
        "prompt_id": group,
    }
    found |= {"dataset": "d", "prompt_token_ids": [1], "response": response, "response_escaped": False, "turns": 1}
    found |= {
        "response_token_ids": ids,
        "loss_mask": ids,
        "rollout_logprobs": [0.0] * len(ids),
        "finish_reason": "stop",
    }
    verdict = json.dumps({"extracted": response[-1]})
    return {**found, **texts, "status": status, "seed": 0, "reward": reward, "verdict": verdict}


def test_a_set_is_summed_up_from_its_table() -> None:
    rows = [
        sample("a", 0, 1.0, "x7"),
        sample("a", 1, 1.0, "yy7"),
        sample("b", 0, None, "8"),
        sample("b", 1, 0.0, "999"),
    ]
    rows[3]["status"] = "truncated"
    found = set_score(from_rows(rows, ROLLOUTS), EvalSet(path="d.jsonl", name="d", n_samples_per_prompt=2))
    assert (found.mean, found.count, found.prompts, found.samples) == (pytest.approx(2 / 3), 2, 2, 4)
    assert (found.unscorable, found.truncated, found.length_mean, found.length_max) == (1, 0.25, 2.25, 3)
    assert (found.pass_at, found.majority) == ({"1": 0.5, "2": 0.5}, 0.5)
    assert found.metrics()["eval/d/pass_at_2"] == 0.5


def test_a_threshold_says_which_score_is_right() -> None:
    rows = [sample("a", 0, 0.6, "7"), sample("b", 0, 0.4, "8")]
    score = set_score(from_rows(rows, ROLLOUTS), EvalSet(path="d.jsonl", name="d", threshold=0.5))
    assert (score.mean, score.pass_at, score.majority) == (pytest.approx(0.5), {"1": 0.5}, None)
