"""The fourth node: which samples are trained on, and a reason for each that is not."""

import time
from dataclasses import dataclass
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from milepost.storage.journal import Slot, StepStore
from milepost.storage.parameters import FilterSection
from milepost.storage.schema import ROLLOUTS
from milepost.storage.tables import TableRef, read_table
from milepost.tasks.filters import filter_table, kept_groups
from milepost.tasks.generate import Shard

_DECIDES = {"group", "options", "sample", "partial_groups"}


@dataclass(frozen=True)
class Filtered:
    """The shard with `kept` and `drop_reason` filled, and how many of its groups have a kept sample."""

    rollouts: TableRef
    kept_groups: int


def is_trained(kept: int, wanted: int, filter: FilterSection) -> bool:
    """Whether a step that kept so many groups, after all its rounds, is trained on."""
    return kept >= wanted or filter.on_too_few == "train_on_less"


def filter_config(filter: FilterSection) -> dict[str, Any]:
    """What decides which samples are kept: the group filter, and what else was asked for."""
    config, defaults = filter.model_dump(mode="json", include=_DECIDES), FilterSection()
    return {name: value for name, value in config.items() if name == "group" or value != getattr(defaults, name)}


@task(task_run_name="filter-{shard.round}.{shard.index}", cache_policy=NO_CACHE)
def filter_rollouts(
    scored: TableRef, shard: Shard, filter: FilterSection, *, store: StepStore, oldest: int | None = None
) -> Filtered:
    """Group filters see whole groups: a shard holds all samples of its prompts. For `oldest` see `filter_table`."""
    started = time.monotonic()
    slot = Slot("filter", shard.round, shard.index)
    config = filter_config(filter) | ({} if oldest is None else {"oldest": oldest})
    key = store.key(slot, [scored], config)
    commit = store.committed(slot, key)
    if commit is None:
        table = filter_table(read_table(scored), filter, oldest=oldest)
        ref = store.write(str(slot), table, ROLLOUTS)
        record = {"kept_groups": kept_groups(table)}
        commit = store.commit(slot, key, {"rollouts": ref}, record=record, started=started)
    return Filtered(commit.tables["rollouts"], commit.record["kept_groups"])
