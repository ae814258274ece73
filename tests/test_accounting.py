"""Every prompt ends in exactly one class, in its step and in its epoch."""

from pathlib import Path

import pyarrow as pa
import pytest

from milepost.engines.protocols import WeightVersion
from milepost.storage import manifest
from milepost.storage.accounting import AccountingError, accounting, check_accounting, epoch_accounting
from milepost.storage.journal import StepStore
from milepost.storage.prompt_order import Cursor
from milepost.storage.runs import RunFolder
from milepost.storage.schema import ROLLOUTS, from_rows
from milepost.tasks.steps import StepOutcome, close_step, served_groups

from .bench.made_run import begin_run, make_run
from .test_tables import rollout


def sample(group: str, number: int, reason: str | None = None) -> dict[str, object]:
    return rollout(f"{group}-{number}", group_id=group, kept=reason is None, drop_reason=reason)


def table(*rows: dict[str, object]) -> pa.Table:
    return from_rows(list(rows), ROLLOUTS)


def test_every_served_group_is_in_exactly_one_class() -> None:
    rows = [sample("a", 0), sample("a", 1, "aborted"), sample("b", 0, "zero_std"), sample("c", 0)]
    found = accounting(["a", "b", "c"], table(*rows), {"a"})
    assert found == {"filtered: zero_std": 1, "trained": 1, "unused": 1, "served": 3}


def test_a_group_is_aborted_when_all_its_samples_are() -> None:
    rows = [sample("a", 0, "aborted"), sample("a", 1, "aborted")]
    rows += [sample("b", 0, "aborted"), sample("b", 1, "too_few_samples")]
    assert accounting(["a", "b"], table(*rows), set()) == {"aborted": 1, "filtered: too_few_samples": 1, "served": 2}


def test_a_group_without_a_sample_is_pending_and_no_step_closes_on_it() -> None:
    counts = accounting(["a", "b"], table(sample("a", 0)), {"a"})
    assert counts == {"pending": 1, "trained": 1, "served": 2}
    with pytest.raises(AccountingError, match=r"step 3 served 2 prompts and 1 have ended \(pending 1, trained 1\)"):
        check_accounting(counts, 3)


def test_a_group_that_nobody_served_is_an_error() -> None:
    counts = accounting(["a"], table(sample("a", 0), sample("z", 0)), {"a"})
    with pytest.raises(AccountingError, match="unserved 1"):
        check_accounting(counts, 0)


def test_a_step_whose_sums_are_off_gets_no_manifest(tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path), "r")
    outcome = StepOutcome(WeightVersion(0, "a"), WeightVersion(1, "b"), Cursor(), "")
    with pytest.raises(AccountingError, match="served 8 prompts and 7 have ended"):
        close_step(StepStore(folder.step(0), "r", 0), folder, outcome, counts={"trained": 7, "served": 8}, metrics={})
    assert manifest.finished_steps(folder) == []


def test_the_served_groups_are_those_of_the_sample_commits(tmp_path: Path) -> None:
    made = make_run(str(tmp_path), 1)
    found = served_groups(StepStore(made.folder.step(0), "made", 0))
    assert found == [f"000000-0-{position:04d}" for position in range(4)]


def test_the_classes_of_an_epoch_sum_to_its_prompts(tmp_path: Path) -> None:
    """Ten prompts, four a step: the third step serves two of the first epoch and two of the second."""
    found = epoch_accounting(make_run(str(tmp_path), 4, prompts=10).folder)
    aside = {"too_long": 2, "malformed": 1}
    assert found == {
        ("", 0): {"filtered: zero_std": 2, "trained": 8, **aside, "prompts": 13},
        ("", 1): {"filtered: zero_std": 2, "trained": 4, "pending": 4, **aside, "prompts": 13},
    }
    for counts in found.values():
        assert sum(count for name, count in counts.items() if name != "prompts") == counts["prompts"]


def test_a_step_in_several_epochs_is_counted_in_each(tmp_path: Path) -> None:
    found = epoch_accounting(make_run(str(tmp_path), 2, prompts=3).folder)
    ended = ("trained", "filtered: zero_std")
    assert [sum(counts.get(name, 0) for name in ended) for counts in found.values()] == [3, 3, 2]


def test_a_step_that_is_not_finished_leaves_its_prompts_pending(tmp_path: Path) -> None:
    made = make_run(str(tmp_path), 2, prompts=8)
    Path(made.folder.manifest(1)).unlink()
    assert epoch_accounting(made.folder)["", 0]["pending"] == 4


def test_a_run_without_a_step_has_no_epoch(tmp_path: Path) -> None:
    assert epoch_accounting(begin_run(str(tmp_path)).folder) == {}


def test_a_moved_run_is_counted_where_it_is(tmp_path: Path) -> None:
    made = make_run(str(tmp_path / "a"), 3, prompts=10)
    before = epoch_accounting(made.folder)
    (tmp_path / "a").rename(tmp_path / "b")
    moved = RunFolder(str(tmp_path / "b" / "made"), "made")
    assert epoch_accounting(moved) == before
