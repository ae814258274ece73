"""What must hold in every row of a step's rollouts, and from one stage to the next."""

from collections import Counter
from collections.abc import Collection
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from milepost.storage.carried import INTERRUPTED
from milepost.storage.schema import ROLLOUTS, STAGE_COLUMNS
from milepost.storage.verify_tables import WRITTEN_SO, Fault, Stack

VERSION_DIGITS = 16
"""Digits of a weights digest that a sample is stamped with."""

_STATUSES = pa.array(["completed", "truncated", "aborted", "invalid", INTERRUPTED])
_UNSTAMPED = pa.array(["aborted", "invalid", INTERRUPTED])
_REASONS = pa.array(["stop", "length", "abort", None])


def lengths(table: pa.Table, column: str) -> Any:
    return pc.list_value_length(table[column])


def not_finite(table: pa.Table, column: str) -> Any:
    """Per row: whether the list in `column` holds a null, a NaN or an infinity. Null lists hold none."""
    values = table[column].combine_chunks()
    values = values.chunk(0) if isinstance(values, pa.ChunkedArray) else values
    finite = pc.fill_null(pc.is_finite(values.flatten()), False)
    if pc.all(finite).as_py() in (True, None):
        return pa.array([False] * table.num_rows)
    bad = set(pc.list_parent_indices(values).filter(pc.invert(finite)).to_pylist())
    return pa.array([row in bad for row in range(table.num_rows)])


def check_rows(rows: Stack, run_id: str, step: int) -> list[Fault]:
    """Identity, lengths, finite numbers and known words, in every row."""
    table = rows.table
    if not table.num_rows:
        return []
    tokens = lengths(table, "response_token_ids")
    masks = table["loss_mask"].combine_chunks()
    masks = masks.chunk(0) if isinstance(masks, pa.ChunkedArray) else masks
    rules = [
        (pc.not_equal(table["run_id"], run_id), f"is not of run {run_id!r}"),
        (pc.not_equal(table["step"], step), f"is not of step {step}"),
        (pc.not_equal(lengths(table, "loss_mask"), tokens), "has a loss mask of another length than its tokens"),
        (
            pc.fill_null(pc.not_equal(lengths(table, "rollout_logprobs"), tokens), False),  # null: not known
            "has other than one log-probability for each of its tokens",
        ),
        (not_finite(table, "rollout_logprobs"), "has a log-probability that is not finite"),
        (pc.invert(pc.is_in(table["status"], _STATUSES)), "has an unknown status"),
        (pc.invert(pc.is_in(table["finish_reason"], _REASONS)), "has an unknown finish reason"),
        (pc.invert(pc.fill_null(pc.is_finite(table["reward"]), True)), "has a reward that is not finite"),
    ]
    if pc.max(masks.flatten()).as_py() not in (0, 1, None):
        rules.append(
            (pa.array([any(mask) and max(mask) > 1 for mask in masks.to_pylist()]), "has a mask beyond 0 and 1")
        )
    faults = [fault for mask, what in rules for fault in rows.flagged(mask, what)]
    return faults + _twice(rows)


def _twice(rows: Stack) -> list[Fault]:
    ids = rows.table["sample_id"].to_pylist()
    if len(set(ids)) == len(ids):
        return []
    twice = {sample for sample, count in Counter(ids).items() if count > 1}
    return rows.flagged(pa.array([sample in twice for sample in ids]), "is stored more than once")


def check_groups(rows: Stack, prompts: dict[str, str], size: int, *, exact: bool = True) -> list[Fault]:
    """Every group was served, is of the prompt that was, and has `size` samples, or at most so many unless `exact`.

    `prompts` has the prompt id of each group.
    """
    table = rows.table
    groups, ids = table["group_id"].to_pylist(), table["prompt_id"].to_pylist()
    strange = [prompts.get(group) != prompt for group, prompt in zip(groups, ids, strict=True)]
    faults = rows.flagged(pa.array(strange, pa.bool_()), "is of a group or a prompt that was not served")
    samples: dict[str, set[str]] = {}
    for group, sample in zip(groups, table["sample_id"].to_pylist(), strict=True):
        samples.setdefault(group, set()).add(sample.partition(".")[0])
    counts = {group: len(found) for group, found in samples.items()}
    wrong = {group: count for group, count in counts.items() if count > size or (exact and count < size)}
    if wrong:
        group, count = next(iter(wrong.items()))
        file = rows.file_of(groups.index(group))
        more = f" (and {len(wrong) - 1} more groups)" if len(wrong) > 1 else ""
        faults.append(Fault(file, f"group {group} has {count} samples, {size} were asked for{more}", WRITTEN_SO))
    return faults


def check_versions(rows: Stack, version: str, carried: Collection[str] = ()) -> list[Fault]:
    """Every sample is stamped with the weights `version`, as STEP-DIGEST, but for those that came to nothing.

    Those of groups that were `carried` over began with older ones.
    """
    table = rows.table
    if not table.num_rows:
        return []
    step, _, digest = version.partition("-")
    stamps = [
        pc.not_equal(table["weight_version_min"], int(step)),
        pc.not_equal(table["weight_version_max"], int(step)),
        pc.not_equal(pc.utf8_slice_codeunits(table["weights_digest"], 0, VERSION_DIGITS), digest[:VERSION_DIGITS]),
    ]
    wrong = stamps[0]
    for stamp in stamps[1:]:
        wrong = pc.or_(wrong, stamp)
    begun_before = pc.is_in(table["group_id"], pa.array(sorted(carried), pa.string()))
    live = pc.invert(pc.or_(pc.is_in(table["status"], _UNSTAMPED), begun_before))
    mask = pc.and_(pc.fill_null(wrong, True), live)
    return rows.flagged(mask, f"is stamped with other weights than {step}-{digest[:VERSION_DIGITS]}, the step's own")


def check_kept(rows: Stack) -> list[Fault]:
    """A filtered sample is kept, or dropped for a reason."""
    table = rows.table
    if not table.num_rows:
        return []
    no_reason = pc.is_null(table["drop_reason"])
    faults = rows.flagged(pc.is_null(table["kept"]), "is neither kept nor dropped")
    kept = pc.fill_null(table["kept"], True)
    faults += rows.flagged(pc.and_(pc.invert(kept), no_reason), "is dropped without a reason")
    return faults + rows.flagged(pc.and_(kept, pc.invert(no_reason)), "is kept and has a reason to be dropped")


def check_stage(stage: str, before: Stack, after: Stack) -> list[Fault]:
    """`after` differs from `before` only in the columns that `stage` fills."""
    names = [name for name in ROLLOUTS.names if name not in STAGE_COLUMNS[stage]]
    if before.table.select(names).equals(after.table.select(names)):
        return []
    if before.table.num_rows != after.table.num_rows:
        rows = f"{after.table.num_rows} samples, the stage before left {before.table.num_rows}"
        return [Fault(after.parts[0][0] if after.parts else before.parts[0][0], f"{stage}: {rows}", WRITTEN_SO)]
    changed = [name for name in names if not before.table[name].equals(after.table[name])]
    fault = _first_change(before, after, changed[0])
    return [
        Fault(fault, f"{stage} changed column {changed[0]!r}, which it may not ({len(changed)} changed)", WRITTEN_SO)
    ]


def _first_change(before: Stack, after: Stack, column: str) -> str:
    old, new = before.table[column].to_pylist(), after.table[column].to_pylist()
    row = next((row for row, pair in enumerate(zip(old, new, strict=True)) if pair[0] != pair[1]), 0)
    return after.file_of(row)
