"""Ending a round of generation as soon as enough groups are kept: over-sampling, and what it costs beyond them.

Each group is judged when it is finished, by the reward and the filters that the stages after will ask: they find what
was said here. Which groups come in time is a matter of time, so what was made of each is committed, and never why.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from milepost.storage.parameters import FilterSection, RewardSection
from milepost.storage.schema import ROLLOUTS, from_rows
from milepost.tasks.filters import filter_table, kept_groups
from milepost.tasks.grading import Checks, Graders, verdicts_of, with_verdicts
from milepost.tasks.verdict import Verdict


class EarlyStop:
    """Sets `event` once `missing` groups are kept. `verdicts` has what was said of every sample that was judged."""

    def __init__(
        self,
        missing: int,
        reward: RewardSection,
        filter: FilterSection,
        *,
        graders: Graders,
        oldest: int | None = None,
    ) -> None:
        self.event = asyncio.Event()
        self.verdicts: dict[str, Verdict] = {}
        self.judged: set[str] = set()
        self._missing = missing
        self._reward = reward
        self._filter = filter
        self._oldest = oldest
        self._graders = graders
        self._checks = Checks()
        self._kept: dict[int, int] = {}

    async def judge(self, shard: int, group: str, rows: Sequence[dict[str, Any]]) -> None:
        """Judge a finished group of a shard, unless the round ends meanwhile."""
        judging = asyncio.ensure_future(self._judge(rows))
        ended = asyncio.ensure_future(self.event.wait())
        try:
            await asyncio.wait({judging, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not self.event.is_set():
                kept, verdicts = judging.result()
                self.verdicts |= verdicts
                self.judged.add(group)
                self.found(shard, self._kept.get(shard, 0) + kept)
        finally:
            judging.cancel()
            ended.cancel()
            await asyncio.gather(judging, ended, return_exceptions=True)

    async def _judge(self, rows: Sequence[dict[str, Any]]) -> tuple[int, dict[str, Verdict]]:
        table = from_rows(list(rows), ROLLOUTS)
        verdicts = await verdicts_of(table, self._reward, pool=self._graders, checks=self._checks)
        filtered = filter_table(with_verdicts(table, verdicts), self._filter, oldest=self._oldest)
        names = table["sample_id"].to_pylist()
        return kept_groups(filtered), dict(zip(names, verdicts, strict=True))

    def found(self, shard: int, kept: int) -> None:
        """So many groups of a shard are kept."""
        self._kept[shard] = kept
        if sum(self._kept.values()) >= self._missing:
            self.event.set()
