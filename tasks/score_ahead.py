"""Scoring that begins while a shard is still generated: each group is graded as soon as it is finished.

What is said of a group waits in memory for the stage that commits it. Where the process dies before, that stage asks
again, and so nothing depends on what was said ahead.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from milepost.storage.parameters import RewardSection
from milepost.storage.schema import ROLLOUTS, from_rows
from milepost.tasks.grading import Checks, Graders, verdicts_of
from milepost.tasks.verdict import Verdict


class ScoreAhead:
    """The groups of one shard that are being graded; used as a block, which ends what is still asked for."""

    def __init__(self, reward: RewardSection, graders: Graders) -> None:
        self._reward = reward
        self._graders = graders
        self._checks = Checks()
        self._asked: list[asyncio.Task[dict[str, Verdict]]] = []

    async def __aenter__(self) -> "ScoreAhead":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        for asked in self._asked:
            asked.cancel()
        await asyncio.gather(*self._asked, return_exceptions=True)

    def finished(self, rows: Sequence[dict[str, Any]]) -> None:
        """Have a finished group graded; nobody waits for it."""
        self._asked.append(asyncio.ensure_future(self._verdicts(rows)))

    async def verdicts(self) -> dict[str, Verdict]:
        """What was said of the finished groups, by sample, when all of it is there.

        A failure of the graders themselves is left to the stage that asks again.
        """
        found: dict[str, Verdict] = {}
        for asked in self._asked:
            with contextlib.suppress(Exception):
                found |= await asked
        return found

    async def _verdicts(self, rows: Sequence[dict[str, Any]]) -> dict[str, Verdict]:
        table = from_rows(list(rows), ROLLOUTS)
        said = await verdicts_of(table, self._reward, pool=self._graders, checks=self._checks)
        return dict(zip(table["sample_id"].to_pylist(), said, strict=True))
