"""The first node: which prompts a step works on."""

import time
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import pyarrow as pa
from prefect import task
from prefect.cache_policies import NO_CACHE

from milepost.storage.carried import carried_entry
from milepost.storage.journal import Slot, StepStore
from milepost.storage.prompt_mixture import Share, serve, shares_entry
from milepost.storage.prompt_order import Cursor, prompt_table
from milepost.storage.schema import PROMPTS
from milepost.storage.tables import TableRef, concat, read_table
from milepost.tasks.carried import NOTHING_CARRIED, Carried, Unfinished, unfinished


@dataclass(frozen=True)
class PromptOrder:
    """The prompts of a run and the order they are served in; `shares` are those of several sets."""

    prompts: TableRef
    seed: int
    shuffle: bool
    shares: tuple[Share, ...] = ()


@dataclass(frozen=True)
class Sampled:
    """The prompts of a round, where the next round goes on, and what there is of groups that are served again."""

    prompts: TableRef
    cursor: Cursor
    carried: Carried = NOTHING_CARRIED


@lru_cache(maxsize=2)
def prompt_set(ref: TableRef) -> pa.Table:
    """The prompt set of a run, read once a process."""
    return read_table(ref)


def _config(order: PromptOrder, cursor: Cursor, count: int) -> dict[str, Any]:
    config = {"seed": order.seed, "shuffle": order.shuffle, "cursor": asdict(cursor), "count": count}
    return config | shares_entry(order.shares)


@task(task_run_name="sample-{round_}", cache_policy=NO_CACHE)
def sample_prompts(
    order: PromptOrder, cursor: Cursor, count: int, *, round_: int, store: StepStore, goes_on: bool = False
) -> Sampled:
    """The next `count` prompts after `cursor`, wrapping into further epochs as often as needed.

    With `goes_on`, the groups that the step before did not finish come first, in place of as many others.
    """
    started = time.monotonic()
    slot = Slot("sample", round_)
    left = unfinished(store) if goes_on else Unfinished()
    key = store.key(slot, [order.prompts, *left.rollouts], _config(order, cursor, count))
    commit = store.committed(slot, key)
    if commit is None:
        table = prompt_set(order.prompts)
        fresh = max(0, count - len(left.groups))
        picks, after = serve(
            fresh, cursor, size=table.num_rows, seed=order.seed, shuffle=order.shuffle, shares=order.shares
        )
        served = prompt_table(table, picks, step=store.step, round_=round_)
        groups: dict[str, str] = {}
        if left.groups:
            again, groups = left.served_again(store.step, first=fresh)
            served = concat([again, served], PROMPTS)
        ref = store.write(str(slot), served, PROMPTS)
        record = {"cursor": asdict(after)} | carried_entry(groups)
        commit = store.commit(slot, key, {"prompts": ref}, record=record, started=started)
    return Sampled(commit.tables["prompts"], Cursor(**commit.record["cursor"]), left.carried(commit))


def shard_of(table: pa.Table, shard: int, shards: int) -> pa.Table:
    """The groups of one shard: every `shards`-th prompt, so that a long tail is spread."""
    return table.take(pa.array(range(shard, table.num_rows, shards), pa.int64()))
