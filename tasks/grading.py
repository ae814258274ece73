"""From samples of a table to what graders are given of them, and from verdicts to columns of the table."""

from dataclasses import asdict, replace
from typing import Any

import pyarrow as pa

from milepost.storage import redaction, text
from milepost.storage.parameters import RewardSection
from milepost.storage.tables import with_columns
from milepost.tasks.rewards import Graders, grade_rows
from milepost.tasks.verdict import Verdict


def grader_rows(table: pa.Table) -> list[dict[str, Any]]:
    """What a grader is given of each sample."""
    columns = table.select(["sample_id", "prompt", "label", "response", "response_escaped", "metadata"]).to_pylist()
    return [
        {
            "sample_id": item["sample_id"],
            "prompt": text.from_json(item["prompt"]),
            "label": text.from_json(item["label"]),
            "response": text.unescape(item["response"], item["response_escaped"]),
            "metadata": text.from_json(item["metadata"]),
        }
        for item in columns
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


async def verdicts_of(table: pa.Table, reward: RewardSection, *, pool: Graders) -> list[Verdict]:
    """A verdict for every sample, in the order of the rows."""
    rows = grader_rows(table)
    options = redaction.resolved({"reward": {"options": reward.options}})["reward"]["options"]
    verdicts = await grade_rows(pool, reward.name, rows, options, timeout_seconds=reward.timeout_seconds)
    return [replace(verdict, reason=redaction.scrubbed(verdict.reason, options)) for verdict in verdicts]
