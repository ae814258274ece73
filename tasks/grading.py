"""From samples of a table to what graders are given of them, and from verdicts to columns of the table."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from types import MappingProxyType
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from milepost.engines.grader_process import START_SECONDS, Answer, Call
from milepost.storage import redaction, text
from milepost.storage.carried import INTERRUPTED
from milepost.storage.parameters import RewardSection
from milepost.storage.prompt_rows import reward_of
from milepost.storage.tables import with_columns
from milepost.tasks.prompt_reward import choice_for, chosen
from milepost.tasks.reward_choice import RewardChoice
from milepost.tasks.rewards import CHECK, SCORE, require_loaded, reward_function, verdicts_from
from milepost.tasks.scoring import PER_GROUP, choice_id
from milepost.tasks.verdict import Verdict

UNGRADED = ("invalid", INTERRUPTED)
"""The statuses of samples that no reward is asked of."""


class Graders(Protocol):
    """Where rewards run: answers in the order of the calls, each within its own deadline."""

    async def map(
        self,
        function: str,
        items: Sequence[Sequence[Any]],
        *,
        timeout_seconds: float,
        warm_up: Call | None = None,
        network: bool = False,
    ) -> list[Answer]: ...


class Checks:
    """What graders say of choices of rewards, for all who score by them: it is asked once, before any sample is."""

    def __init__(self) -> None:
        self._asking = asyncio.Lock()
        self._loaded: dict[str, Answer] = {}

    async def of(self, graders: Graders, choice: RewardChoice) -> Answer:
        """How many samples a call may have, see `scoring.check`; what could not be loaded is asked again."""
        name = text.to_json([choice.as_json(), choice.network])
        async with self._asking:
            if name not in self._loaded:
                answer = await _checked(graders, choice)
                if answer.reason is not None:
                    return answer
                self._loaded[name] = answer
        return self._loaded[name]


async def _checked(graders: Graders, choice: RewardChoice) -> Answer:
    (answer,) = await graders.map(CHECK, [(choice.as_json(),)], timeout_seconds=START_SECONDS, network=choice.network)
    return answer


def grader_rows(table: pa.Table) -> list[dict[str, Any]]:
    """What a grader is given of each sample."""
    lengths = pc.list_value_length(table["response_token_ids"]).to_pylist()
    names = ["sample_id", "group_id", "prompt", "label", "response", "response_escaped", "finish_reason", "metadata"]
    return [
        {
            "sample_id": item["sample_id"],
            "group_id": item["group_id"],
            "response_tokens": length,
            "finish_reason": item["finish_reason"],
            "prompt": text.from_json(item["prompt"]),
            "label": text.from_json(item["label"]),
            "response": text.unescape(item["response"], item["response_escaped"]),
            "metadata": text.from_json(item["metadata"]),
        }
        for item, length in zip(table.select(names).to_pylist(), lengths, strict=True)
    ]


def with_verdicts(table: pa.Table, verdicts: list[Verdict]) -> pa.Table:
    """The table with reward, rewards and verdict filled. A verdict without a score is a null reward with its reason.

    How long a grader took is not in the table: it differs each time, and equal results have to be equal tables.
    """
    rewards = [verdict.score for verdict in verdicts]
    parts = [list(verdict.parts.items()) for verdict in verdicts]
    stored = [
        text.to_json({name: value for name, value in asdict(verdict).items() if name != "seconds"})
        for verdict in verdicts
    ]
    return with_columns(table, {"reward": list(rewards), "rewards": list(parts), "verdict": list(stored)})


async def verdicts_of(
    table: pa.Table,
    reward: RewardSection,
    *,
    pool: Graders,
    known: Mapping[str, Verdict] = MappingProxyType({}),
    checks: Checks | None = None,
) -> list[Verdict]:
    """A verdict for every sample, in the order of the rows.

    Those that are `known`, by sample, are not asked for, nor is there anything to ask of the ones in `UNGRADED`. Who
    asks for many tables gives all of them the same `checks`.
    """
    names, statuses = table["sample_id"].to_pylist(), table["status"].to_pylist()
    found = {
        name: known[name] if name in known else Verdict(None, reason=status)
        for name, status in zip(names, statuses, strict=True)
        if name in known or status in UNGRADED
    }
    asked = table.filter(pa.array([name not in found for name in names], pa.bool_()))
    graded = await _graded(asked, reward, pool=pool, checks=checks or Checks())
    found |= zip(asked["sample_id"].to_pylist(), graded, strict=True)
    return [found[name] for name in names]


async def _graded(table: pa.Table, reward: RewardSection, *, pool: Graders, checks: Checks) -> list[Verdict]:
    rows = grader_rows(table)
    given = redaction.resolved({"reward": reward.model_dump()})["reward"]
    section = RewardSection.model_validate(given)
    by_name: dict[str | None, list[int]] = {}
    for at, row in enumerate(rows):
        by_name.setdefault(reward_of(row["metadata"]) if reward.by_prompt else None, []).append(at)
    found: dict[int, Verdict] = {}
    for places in by_name.values():
        asked = [rows[at] for at in places]
        choice = choice_for(asked[0]["metadata"], section)
        said = await grade_rows(pool, choice, asked, timeout_seconds=reward.timeout_seconds, checks=checks)
        found |= zip(places, said, strict=True)
    return [replace(found[at], reason=redaction.scrubbed(found[at].reason, given)) for at in range(len(rows))]


async def grade_rows(
    graders: Graders,
    choice: RewardChoice,
    rows: Sequence[Mapping[str, Any]],
    *,
    timeout_seconds: float,
    checks: Checks | None = None,
) -> list[Verdict]:
    """A verdict per row, in order, from a pool of graders. A call that hangs or kills its grader costs only itself."""
    if not rows:
        return []
    grader = choice_id(choice)
    loaded = await (checks or Checks()).of(graders, choice)
    if loaded.reason is not None:
        return verdicts_from(loaded, grader, len(rows))
    lots = _lots(rows, loaded.value)
    answers = await graders.map(
        SCORE,
        [(choice.as_json(), [rows[at] for at in lot]) for lot in lots],
        timeout_seconds=timeout_seconds * max(map(len, lots)),
        warm_up=Call(CHECK, (choice.as_json(),)),
        network=choice.network,
    )
    found: dict[int, Verdict] = {}
    for lot, answer in zip(lots, answers, strict=True):
        found |= zip(lot, verdicts_from(answer, grader, len(lot)), strict=True)
    return [found[at] for at in range(len(rows))]


def _lots(rows: Sequence[Mapping[str, Any]], size: int) -> list[list[int]]:
    """Which rows are scored in one call, by place."""
    if size != PER_GROUP:
        return [list(range(at, min(at + size, len(rows)))) for at in range(0, len(rows), size)]
    groups: dict[str, list[int]] = {}
    for at, row in enumerate(rows):
        groups.setdefault(row.get("group_id") or f"row {at}", []).append(at)
    return list(groups.values())


async def require_reward(graders: Graders, reward: RewardSection) -> None:
    """LookupError or ValueError unless a grader can load what scores prompts that ask for no reward themselves."""
    await require_choice(graders, chosen(reward))


async def require_choice(graders: Graders, choice: RewardChoice) -> None:
    """LookupError or ValueError, in the words of `grade`, unless a grader can load the rewards with their options."""
    for part in choice.parts:
        reward_function(part.name)
    require_loaded(choice.name, await _checked(graders, choice))
