"""The journal answers what is done, once, and refuses contradictions."""

import time
from dataclasses import replace
from pathlib import Path

import pytest

from milepost.storage.journal import JournalConflict, Slot, StepStore
from milepost.storage.tables import TableRef


def table(store: StepStore) -> TableRef:
    """A table of the step."""
    return TableRef(f"{store.uri}/x.parquet", 3, "a" * 32, "rollouts")


SLOT = Slot("generate", 0, 2)


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> StepStore:
    uri = str(tmp_path) if request.param == "local" else f"memory://{tmp_path.name}"
    return StepStore(uri, "run", 4)


def test_what_was_committed_is_returned(store: StepStore) -> None:
    key = store.key(SLOT, [table(store)], {"temperature": 1.0})
    assert store.committed(SLOT, key) is None
    written = store.commit(SLOT, key, {"rollouts": table(store)}, record={"n": 3}, started=time.monotonic())
    assert store.committed(SLOT, key) == written


def test_a_second_commit_returns_the_first(store: StepStore) -> None:
    first = store.commit(SLOT, "k", {"rollouts": table(store)}, record={"n": 1}, started=0.0)
    assert store.commit(SLOT, "k", {"rollouts": table(store)}, record={"n": 2}, started=0.0) == first


def test_another_key_in_the_same_slot_is_a_contradiction(store: StepStore) -> None:
    store.commit(SLOT, "k" * 64, {"rollouts": table(store)}, started=0.0)
    with pytest.raises(JournalConflict, match=r"generate-r0-s002 of step 4 in run 'run' was committed under key kkkk"):
        store.committed(SLOT, "other")


def test_a_key_depends_on_everything_that_goes_in(store: StepStore) -> None:
    key = store.key(SLOT, [table(store)], {"seed": 0})
    other = replace(table(store), digest="b" * 64)
    assert key != store.key(SLOT, [other], {"seed": 0})
    assert key != store.key(SLOT, [table(store)], {"seed": 1})
    assert key != store.key(Slot("generate", 1, 2), [table(store)], {"seed": 0})
    assert key != StepStore(store.uri, "run", 5).key(SLOT, [table(store)], {"seed": 0})


def test_a_key_does_not_depend_on_where_a_table_is(store: StepStore) -> None:
    moved = replace(table(store), uri="s3://elsewhere/x.parquet")
    assert store.key(SLOT, [table(store)], {}) == store.key(SLOT, [moved], {})


def test_commits_lists_everything_by_slot(store: StepStore) -> None:
    store.commit(Slot("score"), "b", {}, started=0.0)
    store.commit(Slot("generate"), "a", {}, started=0.0)
    assert [commit.slot for commit in store.commits()] == ["generate-r0", "score-r0"]
