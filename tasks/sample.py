"""The first node: which prompts a step works on."""

import time
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from prefect import task
from prefect.cache_policies import NO_CACHE

from milepost.storage.journal import Slot, StepStore
from milepost.storage.prompt_order import Cursor, prompt_table, take
from milepost.storage.schema import PROMPTS
from milepost.storage.tables import TableRef, read_table


@dataclass(frozen=True)
class PromptOrder:
    """The prompt set of a run and the order it is served in."""

    prompts: TableRef
    seed: int
    shuffle: bool


@dataclass(frozen=True)
class Sampled:
    """The prompts of a round, and where the next round goes on."""

    prompts: TableRef
    cursor: Cursor


@lru_cache(maxsize=2)
def prompt_set(ref: TableRef) -> pa.Table:
    """The prompt set of a run, read once a process."""
    return read_table(ref)


def _config(order: PromptOrder, cursor: Cursor, count: int) -> dict[str, Any]:
    return {"seed": order.seed, "shuffle": order.shuffle, "cursor": asdict(cursor), "count": count}


@task(task_run_name="sample-{round_}", cache_policy=NO_CACHE)
def sample_prompts(order: PromptOrder, cursor: Cursor, count: int, *, round_: int, store: StepStore) -> Sampled:
    """The next `count` prompts after `cursor`, wrapping into further epochs as often as needed."""
    started = time.monotonic()
    slot = Slot("sample", round_)
    key = store.key(slot, [order.prompts], _config(order, cursor, count))
    commit = store.committed(slot, key)
    if commit is None:
        table = prompt_set(order.prompts)
        picks, after = take(count, cursor, size=table.num_rows, seed=order.seed, shuffle=order.shuffle)
        served = prompt_table(table, picks, step=store.step, round_=round_)
        ref = store.write(str(slot), served, PROMPTS)
        commit = store.commit(slot, key, {"prompts": ref}, record={"cursor": asdict(after)}, started=started)
    return Sampled(commit.tables["prompts"], Cursor(**commit.record["cursor"]))


def shard_of(table: pa.Table, shard: int, shards: int) -> pa.Table:
    """The groups of one shard: every `shards`-th prompt, so that a long tail is spread."""
    positions = pa.array(range(table.num_rows), pa.int64())
    return table.filter(pc.equal(pc.subtract(positions, pc.multiply(pc.divide(positions, shards), shards)), shard))
