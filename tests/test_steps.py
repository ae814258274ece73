"""What a step is said to have been."""

import math
from dataclasses import asdict
from pathlib import Path

import pytest

from milepost.engines.protocols import UpdateResult
from milepost.router.engine_work import EngineWork
from milepost.storage.journal import Slot, StepStore
from milepost.storage.schema import ROLLOUTS, from_rows
from milepost.tasks.optimize import batches, first_groups, skipped_in_a_row, stored_results
from milepost.tasks.rollout_metrics import dropped_groups, engine_metrics, is_repetitive, rollout_metrics
from milepost.tasks.steps import update_metrics
from milepost.tasks.verdict import failure_kind

from .test_tables import rollout

TOKENS = {
    "response_token_ids": [1, 2],
    "rollout_logprobs": [-0.5, -0.5],
    "weight_version_min": 0,
    "weight_version_max": 0,
}


def sample(group: str, number: int, **columns: object) -> dict[str, object]:
    return rollout(f"{group}-{number}", group_id=group, **columns)


def table(*rows: dict[str, object]) -> object:
    return from_rows(list(rows), ROLLOUTS)


def test_null_rewards_leave_the_statistics() -> None:
    found = rollout_metrics(table(sample("a", 0, reward=1.0, kept=True), sample("a", 1, reward=None, kept=False)))
    assert (found["rollout/reward"], found["rollout/unscorable"], found["rollout/kept_ratio"]) == (1.0, 1.0, 0.5)


def test_a_step_without_a_reward_has_no_reward_metric() -> None:
    assert "rollout/reward" not in rollout_metrics(table(sample("a", 0, kept=False)))


def test_metrics_have_miles_names_where_they_mean_the_same() -> None:
    versions = {"weight_version_min": 0, "weight_version_max": 1}
    rows = [
        sample("a", 0, reward=1.0, kept=False, loss_mask=[0] * 2, **TOKENS),
        sample("a", 1, reward=1.0, kept=False, loss_mask=[1] * 2, **TOKENS),
        sample("b", 0, reward=0.0, kept=True, loss_mask=[1] * 2, **TOKENS),
        sample("b", 1, reward=1.0, kept=True, loss_mask=[0, 1], **TOKENS | versions),
        sample("c", 0, kept=False, status="interrupted", loss_mask=[1] * 2, **TOKENS),
    ]
    found = rollout_metrics(table(*rows), trained={"b"}, reused_tokens=2)
    expected = {
        "rollout/response_len/mean": 1.4,
        "rollout/response_len/median": 2.0,
        "rollout/response_len/min": 0.0,
        "rollout/zero_std/count_1": 1.0,
        "rollout/zero_std/all_one_percentage": 50.0,
        "rollout/zero_std/all_zero_percentage": 0.0,
        "rollout/weight_version/mixed_version_ratio": 0.2,
        "rollout/interrupted": 1.0,
        "rollout/tokens": 8.0,
        "rollout/efficiency": 0.5,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert dropped_groups({"filtered: zero_std": 3, "trained": 1}) == {"rollout/dynamic_filter/drop_zero_std": 3.0}


def test_samples_that_nothing_came_of_are_counted_by_what_went_wrong() -> None:
    late, sad = '{"reason": "timeout"}', '{"reason": "I did not like it"}'
    rows = [
        sample("a", 0, kept=False, drop_reason="unscorable", verdict=late, status="truncated"),
        sample("a", 1, kept=False, drop_reason="unscorable", verdict=late),
        sample("a", 2, kept=False, drop_reason="unscorable", verdict=sad),
        sample("a", 3, kept=False, drop_reason="unscorable"),
        sample("a", 4, kept=False, drop_reason="aborted", verdict=late),
        sample("b", 0, kept=False, drop_reason="zero_std", reward=1.0),
        sample("b", 1, kept=True, reward=1.0),
    ]
    found = {name: value for name, value in rollout_metrics(table(*rows)).items() if "error_cat" in name}
    assert found == {
        "rollout/error_cat/aborted": 1.0,
        "rollout/error_cat/timeout": 2.0,
        "rollout/error_cat/unscorable": 2.0,
    }


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("timeout", "timeout"),
        ("error: ValueError: timeout: 5", "error"),
        ("not finite: nan", "not_finite"),
        ("label None is not an answer: give a number", "label"),
        ("unreachable: 503 busy", "unreachable"),
        ("math: undecidable; judge: refused: 401 no key", "refused"),
        ("labelled otherwise", "unscorable"),
        ("my crash", "unscorable"),
    ],
)
def test_a_failure_is_of_one_of_a_few_kinds_whatever_its_words(reason: str, kind: str) -> None:
    assert failure_kind(reason) == kind


def test_what_an_engine_says_of_its_work_is_summed_and_what_none_says_is_no_metric() -> None:
    work = EngineWork()
    work.add("a", {"weight_version": "0-aa"})
    assert engine_metrics(work.sums()) == {}
    work.add("b", {"prompt_tokens": 10, "cached_tokens": 0})
    assert engine_metrics(work.sums())["rollout/prefix_cache_hit_rate"] == 0.0
    work.add("b", {"prompt_tokens": 20, "cached_tokens": 9})
    drafted = {"spec_accept_rate": 0.5, "spec_verify_ct": 4, "completion_tokens": 10}
    work.add("c", drafted | {"prompt_tokens": 10, "cached_tokens": 6})
    work.add("d", {"spec_accept_rate": 1.0, "spec_verify_ct": 1, "completion_tokens": 5})
    assert engine_metrics(work.sums()) == {
        "rollout/prefix_cache_hit_rate": pytest.approx(15 / 40),
        "rollout/avg_cached_tokens_per_sample": 7.5,
        "rollout/spec_accept_rate": pytest.approx(0.6),
        "rollout/spec_accept_length": 3.0,
    }


def test_a_long_response_that_says_one_thing_for_ever_is_repetitive() -> None:
    assert is_repetitive("yes " * 3000) and not is_repetitive("yes " * 100)
    assert not is_repetitive(" ".join(str(hash((number, 1))) for number in range(2000)))


def test_update_metrics_are_means_over_the_optimizer_steps() -> None:
    results = [UpdateResult("k0", True, 1, {"loss": 1.0}), UpdateResult("k1", False, 1, {"loss": 3.0})]
    speed = [UpdateResult("c", True, 1, {"tokens_per_second": 3.0, "mfu": 0.5})]
    assert {"perf/actor_train_tok_per_s": 3.0, "perf/actor_train_mfu": 0.5}.items() <= update_metrics(speed).items()
    counts = {"train/optimizer_steps": 1.0, "train/skipped_steps": 1.0, "train/empty_batches": 0.0}
    assert update_metrics(results) == {"train/loss": 2.0} | counts


def test_a_batch_without_a_token_to_train_is_counted_by_itself() -> None:
    found = update_metrics([UpdateResult("k0", False, 0, {"samples": 0.0}), UpdateResult("k1", True, 1, {"loss": 1.0})])
    assert (found["train/empty_batches"], found["train/skipped_steps"], found["train/loss"]) == (1.0, 0.0, 1.0)


def test_a_step_that_was_skipped_is_recorded_without_the_numbers_that_json_does_not_have(tmp_path: Path) -> None:
    skipped = UpdateResult("k0", False, 0, {"loss": math.nan, "grad_norm": math.inf, "lr": 0.1})
    store, slot = StepStore(str(tmp_path), "run", 0), Slot("optimize")
    store.commit(slot, "key", {}, record={"results": [asdict(skipped)]}, started=0.0)
    commit = store.stored(slot)
    assert commit and stored_results(commit) == [skipped] and skipped.metrics == {"lr": 0.1}
    counts = {"train/optimizer_steps": 0.0, "train/skipped_steps": 1.0, "train/empty_batches": 0.0}
    assert update_metrics([skipped]) == {"train/lr": 0.1} | counts


def test_only_the_first_groups_with_a_kept_sample_are_trained() -> None:
    rows = [
        sample("a", 0, kept=False),
        sample("b", 0, kept=True),
        sample("b", 1, kept=False),
        sample("c", 0, kept=True),
    ]
    assert first_groups(table(*rows), 1)["sample_id"].to_pylist() == ["b-0"]


@pytest.mark.parametrize(("count", "sizes"), [(2, [4, 4]), (3, [3, 2, 3]), (8, [1] * 8), (16, [1] * 8)])
def test_batches_hold_every_row_once_in_order(count: int, sizes: list[int]) -> None:
    parts = batches(table(*(sample("a", number) for number in range(8))), count)
    assert [part.num_rows for part in parts] == sizes
    assert [name for part in parts for name in part["sample_id"].to_pylist()] == [f"a-{n}" for n in range(8)]


@pytest.mark.parametrize(
    ("applied", "newest", "skipped"),
    [
        ([], 0, 0),
        ([True], 1, 0),
        ([False], 1, 1),
        ([True, False, False], 1, 2),
        ([False, True], 1, 0),
        ([False, False, True], 2, 2),  # too many are too many, whatever the last of a step came to
        ([False, False, True], 0, 0),
    ],
)
def test_skips_count_only_in_a_row_and_up_to_the_newest_step(applied: list[bool], newest: int, skipped: int) -> None:
    assert skipped_in_a_row(applied, newest) == skipped
