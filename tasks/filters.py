"""Which samples are trained on: every one that is not has a reason, and a group is judged by its trainable samples."""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa

from milepost.storage.carried import INTERRUPTED
from milepost.storage.parameters import FilterSection
from milepost.storage.registry import check_arity, resolve
from milepost.storage.tables import with_columns

GROUP = "milepost.filters"
SAMPLE = "milepost.sample_filters"
TOO_FEW = "too_few_samples"
INCOMPLETE = "incomplete_group"
STALE = "stale"


@dataclass(frozen=True)
class Keep:
    """Whether a group or a sample is trained on, and in one word why not."""

    keep: bool
    reason: str = ""


Row = dict[str, Any]
Filter = Callable[[list[Row]], Keep]
SampleFilter = Callable[[Row], Keep]


def none(group: list[Row]) -> Keep:
    """Keeps every group."""
    return Keep(True)


def nonzero_std(group: list[Row]) -> Keep:
    """Keeps groups whose rewards differ: the others have no advantage (dynamic sampling, arXiv:2503.14476)."""
    rewards = [row["reward"] for row in group]
    return Keep(True) if max(rewards) != min(rewards) else Keep(False, "zero_std")


def reward_range(group: list[Row], *, low: float = -math.inf, high: float = math.inf) -> Keep:
    """Keeps groups whose mean reward is from `low` to `high`: neither too hard nor too easy."""
    mean = math.fsum(row["reward"] for row in group) / len(group)
    if low <= mean <= high:
        return Keep(True)
    return Keep(False, "reward_below_range" if mean < low else "reward_above_range")


def no_aborted(group: list[Row]) -> Keep:
    """Keeps groups that no sample was lost of. It sees the lost ones, too."""
    return Keep(all(row["status"] != "aborted" for row in group), "has_aborted")


def any_sample(row: Row) -> Keep:
    """Keeps every sample."""
    return Keep(True)


def not_truncated(row: Row) -> Keep:
    """Keeps samples that ended by themselves (overlong filtering, arXiv:2503.14476)."""
    return Keep(row["status"] != "truncated", "truncated")


FILTERS: dict[str, Filter] = {
    "none": none,
    "nonzero_std": nonzero_std,
    "reward_range": reward_range,
    "no_aborted": no_aborted,
}
SAMPLE_FILTERS: dict[str, SampleFilter] = {"none": any_sample, "not_truncated": not_truncated}

# Built-in filters look at these alone; turning every token into a Python object takes longer than filtering.
_JUDGED = ["group_id", "sample_id", "status", "reward", "weight_version_min"]
_SEES_ALL = {"no_aborted"}


def get_filter(name: str, options: dict[str, Any] | None = None) -> Filter:
    """The group filter called `name`: a callable from a group's rows to Keep."""
    found: Filter = resolve(name, FILTERS, group=GROUP)
    check_arity(found, 1, name=name, group=GROUP)
    if not options:
        return found
    try:
        inspect.signature(found).bind([], **options)
    except TypeError as error:
        raise ValueError(f"filter.options do not fit filter {name!r}: {error}") from None
    return partial(found, **options)


def get_sample_filter(name: str) -> SampleFilter:
    """The sample filter called `name`: a callable from a row to Keep."""
    found: SampleFilter = resolve(name, SAMPLE_FILTERS, group=SAMPLE)
    check_arity(found, 1, name=name, group=SAMPLE)
    return found


def kept_groups(table: pa.Table) -> int:
    """How many groups of a filtered table have a kept sample."""
    return len(set(table.filter(table["kept"])["group_id"].to_pylist()))


def filter_table(table: pa.Table, filter: FilterSection, *, oldest: int | None = None) -> pa.Table:
    """`table` with `kept` and `drop_reason` filled.

    A sample that is aborted, invalid, empty or unscorable, that has a token of weights before version `oldest`, or
    that the sample filter refuses, is dropped for that. Its group goes on without it, unless `partial_groups` is to
    drop such groups; the group filter sees what is left. A group with one trainable sample left of several is dropped:
    it has nothing to compare.
    """
    builtin = filter.group in FILTERS and filter.sample in SAMPLE_FILTERS
    rows = (table.select(_JUDGED) if builtin else table).to_pylist()
    lengths = [len(tokens) for tokens in table["response_token_ids"]]
    accepts, judge = get_sample_filter(filter.sample), get_filter(filter.group, filter.options)
    flaws = [_flaw(row, length, oldest) for row, length in zip(rows, lengths, strict=True)]
    reasons = [flaw or _reason(accepts(row), filter.sample) for row, flaw in zip(rows, flaws, strict=True)]
    groups: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        groups.setdefault(row["group_id"], []).append(index)
    for members in groups.values():
        trainable = [index for index in members if reasons[index] is None]
        if len(trainable) < min(2, len(members)):
            reason: str | None = TOO_FEW
        elif filter.partial_groups == "drop" and any(flaws[index] for index in members):
            reason = INCOMPLETE
        else:
            seen = members if filter.group in _SEES_ALL else trainable
            reason = _reason(judge([rows[index] for index in seen]), filter.group)
        for index in trainable:
            reasons[index] = reason
    return with_columns(table, {"kept": [reason is None for reason in reasons], "drop_reason": list(reasons)})


def _flaw(row: Row, tokens: int, oldest: int | None) -> str | None:
    """Why this sample cannot be trained on, whatever its group."""
    if row["status"] in ("aborted", "invalid", INTERRUPTED):
        return str(row["status"])
    if tokens == 0:
        return "empty"
    if row["reward"] is None or not math.isfinite(row["reward"]):
        return "unscorable"
    version = row["weight_version_min"]
    return STALE if oldest is not None and version is not None and version < oldest else None


def _reason(keep: Keep, name: str) -> str | None:
    """Why a filter drops what it was asked of, or None when it keeps that."""
    if not isinstance(keep, Keep):
        raise ValueError(f"filter {name!r} returned {keep!r}, it must return Keep(keep, reason)")
    return None if keep.keep else keep.reason or name
