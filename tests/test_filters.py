"""Every sample that is not trained on has a reason, and costs its group as little as possible."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from milepost.storage.accounting import accounting
from milepost.storage.journal import Slot, StepStore
from milepost.storage.parameters import FilterSection
from milepost.storage.parent import TAKEN, Taken
from milepost.storage.schema import ROLLOUTS, STAGE_COLUMNS, from_rows
from milepost.storage.tables import read_table
from milepost.tasks.filter import filter_rollouts
from milepost.tasks.filters import filter_table, get_filter, get_sample_filter
from milepost.tasks.generate import Shard
from milepost.tasks.staleness import oldest_version


def sample(group: str, reward: float | None = 0.0, *, status: str = "completed", tokens: int = 2) -> dict[str, Any]:
    texts = ["run_id", "sample_id", "prompt_id", "dataset", "response", "finish_reason"]
    return {
        **dict.fromkeys(texts, "x"),
        **dict.fromkeys(["step", "shard", "turns", "seed"], 0),
        **dict.fromkeys(["prompt", "label", "sampling", "metadata"], "{}"),
        "group_id": group,
        "response_escaped": False,
        "prompt_token_ids": [1],
        "response_token_ids": [1] * tokens,
        "loss_mask": [1] * tokens,
        "rollout_logprobs": [0.0] * tokens,
        "status": status,
        "reward": reward,
    }


def reasons(rows: list[dict[str, Any]], name: str = "none", **settings: Any) -> list[str | None]:
    table = filter_table(from_rows(rows, ROLLOUTS), FilterSection(group=name, **settings))
    assert table["kept"].to_pylist() == [reason is None for reason in table["drop_reason"].to_pylist()]
    found: list[str | None] = table["drop_reason"].to_pylist()
    return found


def test_each_flaw_has_its_reason_and_the_rest_of_the_group_stays() -> None:
    rows = [
        sample("a"),
        sample("a", status="aborted"),
        sample("a", status="invalid", reward=None),
        sample("a", tokens=0),
        sample("a", None),
        sample("a", status="truncated"),
    ]
    assert reasons(rows) == [None, "aborted", "invalid", "empty", "unscorable", None]


def test_one_sample_left_of_several_is_too_few() -> None:
    assert reasons([sample("a"), sample("a", None)]) == ["too_few_samples", "unscorable"]
    assert reasons([sample("a")]) == [None]
    assert reasons([sample("a", None)]) == ["unscorable"]


def test_a_sample_with_a_token_of_older_weights_than_allowed_is_stale() -> None:
    """Of the step's own weights, of the oldest that are not stale, of ones before, and of none that are known."""
    rows = [sample("a") | {"weight_version_min": version} for version in (5, 3, 2, None)]
    found = filter_table(from_rows(rows, ROLLOUTS), FilterSection(), oldest=3)
    assert found["drop_reason"].to_pylist() == [None, None, "stale", None]
    assert filter_table(from_rows(rows, ROLLOUTS), FilterSection())["kept"].to_pylist() == [True] * 4


@pytest.mark.parametrize(("made_by", "oldest"), [(None, 5), ("3-ab", 1), ("", None)])
def test_staleness_counts_from_the_weights_that_the_samples_of_the_step_are_of(
    tmp_path: Path, made_by: str | None, oldest: int | None
) -> None:
    """The step's own, those of the run that the samples come from, or none that are known."""
    store, shard = StepStore(str(tmp_path), "run", 9), Shard(0, 1, 0)
    if made_by is not None:
        record = {TAKEN: asdict(Taken("other", 3, "", made_by, {}))}
        store.commit(Slot("generate", 0, 0), "key", {}, record=record, started=0.0)
    assert oldest_version(store, shard, version="7-ab", max_staleness=2) == oldest
    assert oldest_version(store, shard, version="7-ab", max_staleness=None) is None


def test_a_group_of_stale_samples_is_accounted_for_as_that(tmp_path: Path) -> None:
    store = StepStore(str(tmp_path), "run", 9)
    rows = [sample(group) | {"weight_version_min": version} for group, version in (("a", 4), ("b", 5))]
    scored = store.write("scored", from_rows(rows, ROLLOUTS), ROLLOUTS)
    filtered = filter_rollouts.fn(scored, Shard(0, 1, 0), FilterSection(), store=store, oldest=5)
    assert filtered.kept_groups == 1
    assert accounting(["a", "b"], read_table(filtered.rollouts), {"b"}) == {
        "filtered: stale": 1,
        "trained": 1,
        "served": 2,
    }


def test_groups_without_spread_are_dropped_on_request() -> None:
    rows = [sample("a", 1.0), sample("b", 1.0), sample("a", 1.0), sample("b", 0.0)]
    assert reasons(rows, "nonzero_std") == ["zero_std", None, "zero_std", None]
    assert reasons(rows) == [None] * 4


@pytest.mark.parametrize("rewards", [[1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 0, 0]])
def test_the_one_that_differs_stays_with_its_group(rewards: list[float]) -> None:
    assert reasons([sample("a", reward) for reward in rewards], "nonzero_std") == [None] * 4


def test_spread_is_judged_without_the_unscorable() -> None:
    assert reasons([sample("a", 1.0), sample("a", 1.0), sample("a", None)], "nonzero_std")[:2] == ["zero_std"] * 2


def test_one_lost_sample_of_eight_costs_the_group_that_sample_or_all_as_one_likes() -> None:
    rows = [*(sample("a", reward % 2) for reward in range(7)), sample("a", status="aborted")]
    assert reasons(rows) == [None] * 7 + ["aborted"]
    assert reasons(rows, partial_groups="drop") == ["incomplete_group"] * 7 + ["aborted"]
    assert reasons(rows, "no_aborted") == ["has_aborted"] * 7 + ["aborted"]
    assert reasons(rows[:7], "no_aborted") == [None] * 7


def test_groups_outside_of_a_range_of_rewards_are_dropped() -> None:
    rows = [sample(group, reward) for group, mean in (("a", 0), ("b", 1), ("c", 2)) for reward in (mean, mean)]
    found = reasons(rows, "reward_range", options={"low": 0.5, "high": 1.0})
    assert found == ["reward_below_range"] * 2 + [None] * 2 + ["reward_above_range"] * 2


def test_a_sample_filter_drops_samples_before_their_group_is_judged() -> None:
    rows = [sample("a", 1.0), sample("a", 1.0), sample("a", 0.0, status="truncated")]
    assert reasons(rows, "nonzero_std") == [None] * 3
    assert reasons(rows, "nonzero_std", sample="not_truncated") == ["zero_std", "zero_std", "truncated"]
    assert reasons(rows, sample="not_truncated") == [None, None, "truncated"]


def test_the_samples_of_an_interrupted_group_are_dropped_for_that_even_when_finished() -> None:
    assert reasons([sample("a", 1.0, status="interrupted"), sample("a", status="interrupted")]) == ["interrupted"] * 2


def test_only_the_columns_of_the_stage_change() -> None:
    table = from_rows([sample("a", 1.0), sample("a", 0.0)], ROLLOUTS)
    filtered = filter_table(table, FilterSection(group="nonzero_std"))
    assert all(table[name].equals(filtered[name]) for name in set(table.column_names) - STAGE_COLUMNS["filter"])
    assert filter_table(ROLLOUTS.empty_table(), FilterSection()).num_rows == 0


def test_a_filter_of_ones_own_sees_whole_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_filter.py").write_text(
        "from milepost.tasks.filters import Keep\n"
        "def short(group):\n    return Keep(all(len(row['response_token_ids']) < 3 for row in group), 'long')\n"
        "def wrong(group):\n    return True\n"
    )
    rows = [sample("a"), sample("a"), sample("b", tokens=3), sample("b")]
    assert reasons(rows, "own_filter:short") == [None, None, "long", "long"]
    with pytest.raises(ValueError, match=r"returned True, it must return Keep\(keep, reason\)"):
        reasons(rows, "own_filter:wrong")
    sys.modules.pop("own_filter")


def test_an_unknown_filter_is_refused_with_the_nearest() -> None:
    with pytest.raises(LookupError, match="did you mean 'nonzero_std'"):
        get_filter("nonzero-std")
    with pytest.raises(LookupError, match="did you mean 'not_truncated'"):
        get_sample_filter("truncated")
    with pytest.raises(ValueError, match=r"filter.options do not fit filter 'reward_range': .*'lowest'"):
        get_filter("reward_range", {"lowest": 1})
