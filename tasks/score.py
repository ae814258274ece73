"""The third node: a verdict for every sample, from graders that run elsewhere and against a deadline."""

import time
from dataclasses import asdict
from typing import Any

import pyarrow as pa
from prefect import task
from prefect.cache_policies import NO_CACHE

from milepost.engines.graders import GraderPool
from milepost.storage import text
from milepost.storage.journal import Slot, StepStore
from milepost.storage.parameters import RewardSection
from milepost.storage.schema import ROLLOUTS
from milepost.storage.tables import TableRef, read_table, with_columns
from milepost.tasks.generate import Shard
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
    return await grade_rows(pool, reward.name, rows, reward.options, timeout_seconds=reward.timeout_seconds)


@task(task_run_name="score-{shard.round}.{shard.index}", cache_policy=NO_CACHE)
async def score_rollouts(
    generated: TableRef, shard: Shard, reward: RewardSection, *, run: str, store: StepStore
) -> TableRef:
    """The shard's samples with their rewards and verdicts."""
    started = time.monotonic()
    slot = Slot("score", shard.round, shard.index)
    key = store.key(slot, [generated], reward.model_dump(mode="json", exclude={"workers"}))
    commit = store.committed(slot, key)
    if commit is None:
        pool = GraderPool.connect(run, workers=reward.workers)
        table = read_table(generated)
        verdicts = await verdicts_of(table, reward, pool=pool)
        ref = store.write(str(slot), with_verdicts(table, verdicts), ROLLOUTS)
        record = {"grader_seconds": [round(verdict.seconds, 6) for verdict in verdicts]}
        commit = store.commit(slot, key, {"rollouts": ref}, record=record, started=started)
    return commit.tables["rollouts"]
