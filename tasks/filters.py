"""Which samples are trained on: every one that is not has a reason, and a group is judged by its trainable samples."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from milepost.storage.registry import check_arity, resolve
from milepost.storage.tables import with_columns

GROUP = "milepost.filters"
TOO_FEW = "too_few_samples"


@dataclass(frozen=True)
class Keep:
    """Whether a group is trained on, and in one word why not."""

    keep: bool
    reason: str = ""


Row = dict[str, Any]
Filter = Callable[[list[Row]], Keep]


def none(group: list[Row]) -> Keep:
    """Keeps every group."""
    return Keep(True)


def nonzero_std(group: list[Row]) -> Keep:
    """Keeps groups whose rewards differ: the others have no advantage (dynamic sampling, arXiv:2503.14476)."""
    rewards = [row["reward"] for row in group]
    return Keep(True) if max(rewards) != min(rewards) else Keep(False, "zero_std")


FILTERS: dict[str, Filter] = {"none": none, "nonzero_std": nonzero_std}

# Built-in filters look at these alone; turning every token into a Python object takes longer than filtering.
_JUDGED = ["group_id", "sample_id", "status", "reward"]


def get_filter(name: str) -> Filter:
    """The group filter called `name`: a callable from a group's rows to Keep."""
    found: Filter = resolve(name, FILTERS, group=GROUP)
    check_arity(found, 1, name=name, group=GROUP)
    return found


def filter_table(table: pa.Table, name: str) -> pa.Table:
    """`table` with `kept` and `drop_reason` filled by the group filter `name`.

    A sample that is aborted, invalid, empty or unscorable is dropped for that and its group goes on without it; the
    filter sees what is left. A group with one trainable sample left of several is dropped: it has nothing to compare.
    """
    judge = get_filter(name)
    rows = (table.select(_JUDGED) if name in FILTERS else table).to_pylist()
    lengths = [len(tokens) for tokens in table["response_token_ids"]]
    reasons: list[str | None] = [_flaw(row, length) for row, length in zip(rows, lengths, strict=True)]
    groups: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        groups.setdefault(row["group_id"], []).append(index)
    for members in groups.values():
        trainable = [index for index in members if reasons[index] is None]
        reason = _verdict(judge, name, [rows[index] for index in trainable], len(members))
        for index in trainable:
            reasons[index] = reason
    return with_columns(table, {"kept": [reason is None for reason in reasons], "drop_reason": list(reasons)})


def _flaw(row: Row, tokens: int) -> str | None:
    """Why this sample cannot be trained on, whatever its group."""
    if row["status"] in ("aborted", "invalid"):
        return str(row["status"])
    if tokens == 0:
        return "empty"
    if row["reward"] is None or not math.isfinite(row["reward"]):
        return "unscorable"
    return None


def _verdict(judge: Filter, name: str, trainable: list[Row], size: int) -> str | None:
    """Why the group is dropped, or None when it is kept."""
    if len(trainable) < min(2, size):
        return TOO_FEW
    keep = judge(trainable)
    if not isinstance(keep, Keep):
        raise ValueError(f"filter {name!r} returned {keep!r} for a group, it must return Keep(keep, reason)")
    return None if keep.keep else keep.reason or name
