"""What a run that over-samples has stored of its samples, whatever its engines."""

from dataclasses import dataclass
from typing import Any

from milepost.storage.carried import carried_groups
from milepost.storage.journal import Slot, StepStore
from milepost.storage.runs import RunFolder
from milepost.storage.tables import read_table


@dataclass(frozen=True)
class OverSampled:
    """The samples of a run by step, and of those that a step went on with, what they were before."""

    folder: RunFolder

    def rows(self, step: int) -> list[dict[str, Any]]:
        commits = self._store(step).commits()
        filtered = (commit.tables["rollouts"] for commit in commits if Slot.parse(commit.slot).stage == "filter")
        return [row for ref in filtered for row in read_table(ref).to_pylist()]

    def former(self, step: int) -> dict[str, dict[str, Any]]:
        """What the step before has made of the samples of `step` that it began, by their ids in `step`."""
        commit = self._store(step).stored(Slot("sample"))
        assert commit is not None
        new = {old: name for name, old in carried_groups(commit.record).items()}
        rows = [row for row in self.rows(step - 1) if row["group_id"] in new]
        return {new[row["group_id"]] + row["sample_id"].removeprefix(row["group_id"]): row for row in rows}

    def check_continued(self, step: int) -> int:
        """Assert that each sample that `step` went on with begins as it was; how many of them grew."""
        former, grown = self.former(step), 0
        rows = {row["sample_id"]: row for row in self.rows(step) if row["sample_id"] in former}
        assert rows.keys() == former.keys()
        for name, row in rows.items():
            before, count = former[name], len(former[name]["response_token_ids"])
            assert row["prompt_id"] == before["prompt_id"]
            if count and not before["response"].endswith("\ufffd"):
                assert row["response_token_ids"][:count] == before["response_token_ids"]
                assert row["rollout_logprobs"][:count] == before["rollout_logprobs"]
                grown += len(row["response_token_ids"]) > count
        return grown

    def _store(self, step: int) -> StepStore:
        return StepStore(self.folder.step(step), self.folder.run_id, step)
