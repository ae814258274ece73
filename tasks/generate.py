"""The second node: samples for the prompts of one shard, over HTTP through the router."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from prefect import task
from prefect.cache_policies import NO_CACHE

from milepost.engines.protocols import WeightVersion
from milepost.router.client import HttpGenerate, open_client
from milepost.router.engine_work import EngineWork
from milepost.storage import text
from milepost.storage.carried import INTERRUPTED
from milepost.storage.journal import Slot, StepStore
from milepost.storage.parameters import RolloutSection
from milepost.storage.schema import ROLLOUTS, from_rows
from milepost.storage.tables import TableRef, read_table
from milepost.tasks.asking import Asking, Rows
from milepost.tasks.carried import NOTHING_CARRIED, Carried, Earlier, earlier_samples
from milepost.tasks.early_stop import EarlyStop
from milepost.tasks.rollouts import get_rollout
from milepost.tasks.sample import shard_of
from milepost.tasks.samples import Prompt
from milepost.tasks.sampling import Sampling
from milepost.tasks.score_ahead import ScoreAhead
from milepost.tasks.toolbox import connect_toolbox
from milepost.tasks.tools import Toolbox

REUSED_TOKENS = "reused_tokens"
"""In the record of a commit: how many tokens of its samples an earlier step has generated."""
ENGINE_WORK = "engine_work"
"""In the record of a commit: the sums of what the engines say of their work, where they do."""


@dataclass(frozen=True)
class Shard:
    """One slice of a round: its number, how many there are, and the round."""

    index: int
    count: int
    round: int


def prompts_of(table: pa.Table) -> list[Prompt]:
    return [
        Prompt(
            prompt_id=item["prompt_id"],
            group_id=item["group_id"],
            dataset=item["dataset"],
            content=text.from_json(item["prompt"]),
            token_ids=item["prompt_token_ids"],
            label=text.from_json(item["label"]),
            metadata=text.from_json(item["metadata"]),
        )
        for item in table.to_pylist()
    ]


@dataclass(frozen=True)
class Collection:
    """How the groups of a shard are collected: how many requests at a time, when enough are kept, who scores ahead."""

    concurrency: int
    by_group: bool = False
    early: EarlyStop | None = None
    ahead: ScoreAhead | None = None

    def places(self, samples: int) -> tuple[asyncio.Semaphore, asyncio.Semaphore]:
        """For groups of so many samples, and for samples: a group that comes whole waits until there is room for it."""
        groups = max(1, self.concurrency // samples) if self.by_group else self.concurrency
        return asyncio.Semaphore(groups), asyncio.Semaphore(self.concurrency)


async def generate_rows(
    asking: Asking, prompts: list[Prompt], collection: Collection, *, place: dict[str, Any]
) -> Rows:
    """The rows of every sample of `prompts`, in order. The first failure cancels the rest and is raised.

    Where it ends early, the groups that were not judged by then are interrupted, with what there is of each.
    """
    size, early = asking.sampling.n_samples_per_prompt, collection.early
    group_places, sample_places = collection.places(size)

    async def one(prompt: Prompt, index: int) -> Rows:
        async with sample_places:
            return [place | found for found in await asking.rows(prompt, index)]

    async def whole(prompt: Prompt) -> Rows:
        async with group_places, asyncio.TaskGroup() as group:
            running = [group.create_task(one(prompt, index)) for index in range(size)]
        rows = list(chain(*(done.result() for done in running)))
        if early is not None:
            await early.judge(place["shard"], prompt.group_id, rows)
        if collection.ahead is not None:
            collection.ahead.finished(rows)
        return rows

    async with asyncio.TaskGroup() as group:
        running = [group.create_task(whole(prompt)) for prompt in prompts]
    found = [done.result() for done in running]
    if early is not None:
        cut = [prompt.group_id not in early.judged for prompt in prompts]
        found = [_interrupted(rows) if is_cut else rows for rows, is_cut in zip(found, cut, strict=True)]
    return list(chain(*found))


def _interrupted(rows: Rows) -> Rows:
    return [row | {"status": INTERRUPTED} for row in rows]


async def generate_table(
    prompts: list[Prompt],
    sampling: Sampling,
    rollout: RolloutSection,
    *,
    router_url: str,
    place: dict[str, Any],
    earlier: Mapping[str, Earlier] = MappingProxyType({}),
    version: WeightVersion | None = None,
    early: EarlyStop | None = None,
    ahead: ScoreAhead | None = None,
    tools: Toolbox | None = None,
    work: EngineWork | None = None,
) -> pa.Table:
    """Samples for `prompts` as a rollouts table; `place` holds run_id, step and shard, `work` is added to."""
    collection = Collection(rollout.concurrency, rollout.submission == "group", early, ahead)
    stop = early.event if early else asyncio.Event()
    async with open_client(rollout.concurrency) as client:
        generate = HttpGenerate(
            router_url,
            client,
            timeout_seconds=rollout.timeout_seconds,
            stop=stop,
            vocabulary=sampling.vocabulary,
            work=work or EngineWork(),
        )
        asking = Asking(generate, get_rollout(sampling.function), sampling, version, earlier, stop, tools)
        rows = await generate_rows(asking, prompts, collection, place=place)
    return from_rows(rows, ROLLOUTS)


def require_sound(table: pa.Table) -> None:
    """ValueError when not one sample of many can be trained on: the engine is wrong, and the samples are not."""
    reasons = [text.from_json(found)["invalid"] for found in invalid_metadata(table)]
    if table.num_rows and len(reasons) == table.num_rows:
        raise ValueError(f"all {table.num_rows} samples of a shard are invalid; the first: {reasons[0]}")


def invalid_metadata(table: pa.Table) -> list[str]:
    found: list[str] = table.filter(pc.equal(table["status"], "invalid"))["metadata"].to_pylist()
    return found


@task(task_run_name="generate-{shard.round}.{shard.index}", cache_policy=NO_CACHE)
async def generate_rollouts(
    prompts: TableRef,
    shard: Shard,
    sampling: Sampling,
    rollout: RolloutSection,
    *,
    weight_version: str,
    router_url: str,
    store: StepStore,
    carried: Carried = NOTHING_CARRIED,
    early: EarlyStop | None = None,
    ahead: ScoreAhead | None = None,
) -> TableRef:
    """Samples for every prompt of the shard, as rows of the rollouts table.

    With `sampling.partial`, those of `carried` groups go on from what there is of them.
    """
    started = time.monotonic()
    slot = Slot("generate", shard.round, shard.index)
    going_on = carried if sampling.partial and carried.groups else NOTHING_CARRIED
    config = sampling.identity() | {"shards": shard.count, "weight_version": weight_version}
    key = store.key(slot, [prompts, *going_on.tables], config)
    commit = store.committed(slot, key)
    if commit is None:
        chosen = prompts_of(shard_of(read_table(prompts), shard.index, shard.count))
        earlier = earlier_samples(going_on, [prompt.group_id for prompt in chosen])
        work = EngineWork()
        table = await generate_table(
            chosen,
            sampling,
            rollout,
            router_url=router_url,
            place={"run_id": store.run_id, "step": store.step, "shard": shard.index},
            earlier=earlier,
            version=WeightVersion.parse(weight_version) if going_on.groups else None,
            early=early,
            ahead=ahead,
            tools=await connect_toolbox(sampling, run=store.run_id, workers=rollout.tool_workers),
            work=work,
        )
        require_sound(table)
        record = {
            REUSED_TOKENS: sum(len(found.sample.token_ids) for found in earlier.values()),
            ENGINE_WORK: work.sums(),
        }
        commit = store.commit(
            slot,
            key,
            {"rollouts": store.write(str(slot), table, ROLLOUTS)},
            record={name: value for name, value in record.items() if value},
            started=started,
        )
    return commit.tables["rollouts"]
