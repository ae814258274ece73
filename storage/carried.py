"""Groups that a step served and did not finish, because it had enough: the next step serves them first, once more.

A step that does so says it in the record of its `sample` commit: new group ids, and the ones they had.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from milepost.storage.parameters import Parameters

INTERRUPTED = "interrupted"
"""The status of each sample of such a group, whether or not it was finished, and why none of them is trained on."""

_ENTRY = "carried"


def interrupted_groups(tables: Iterable[pa.Table]) -> list[str]:
    """The groups in rollouts tables that were not finished, in order."""
    found = (table.filter(pc.equal(table["status"], INTERRUPTED))["group_id"].to_pylist() for table in tables)
    return list(dict.fromkeys(group for groups in found for group in groups))


def carried_entry(groups: Mapping[str, str]) -> dict[str, Any]:
    """What the record of a `sample` commit says of groups by their new ids; nothing when there are none."""
    return {_ENTRY: dict(groups)} if groups else {}


def carried_groups(record: Mapping[str, Any]) -> dict[str, str]:
    """The id that each group had in the step before, by its new one."""
    return dict(record.get(_ENTRY, {}))


def round_size(parameters: Parameters, rollout_batch_size: int) -> int:
    """Prompts of a round."""
    return parameters.rollout.over_sampling_batch_size or rollout_batch_size
