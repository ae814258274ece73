"""The batch plan of a step, worked out again from what was kept, against what the optimizer was given."""

import itertools
from collections import Counter
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from milepost.storage.batch_plan import BatchPlan
from milepost.storage.micro_batches import trained_lengths
from milepost.storage.verify_samples import check_stage, lengths, not_finite
from milepost.storage.verify_tables import WRITTEN_SO, Fault, Stack

_OPTIONAL = ("ref_logprobs", "importance_weights", "values", "returns")


def chosen(filtered: pa.Table, groups: int) -> pa.Table:
    """The kept samples of the first `groups` groups that have one."""
    kept = filtered.filter(pc.fill_null(filtered["kept"], False))
    first = list(dict.fromkeys(kept["group_id"].to_pylist()))[:groups]
    return kept.filter(pc.is_in(kept["group_id"], pa.array(first, pa.string())))


def planned_sizes(rows: int, count: int) -> list[int]:
    """Rows of each batch: `count` consecutive slices as equal as can be, those without a row left out."""
    bounds = [round(index * rows / count) for index in range(count + 1)]
    return [size for size in (end - start for start, end in itertools.pairwise(bounds)) if size]


def check_batches(filtered: Stack, batches: Stack, plan: BatchPlan, *, on_too_few: str, commit_uri: str) -> list[Fault]:
    """Each chosen sample is in exactly one batch, with an advantage, and the batches are as large as the plan says."""
    wanted = chosen(filtered.table, plan.rollout_batch_size)
    groups = len(set(wanted["group_id"].to_pylist()))
    if not batches.parts:
        skipped = groups < plan.rollout_batch_size and on_too_few == "skip_step"
        missing = bool(wanted.num_rows) and not skipped
        return (
            [Fault(commit_uri, f"{wanted.num_rows} samples were kept and none trained", WRITTEN_SO)] if missing else []
        )
    faults = _membership(wanted, batches, commit_uri)
    if faults:
        return faults
    sizes = [rows for _, rows in batches.parts]
    planned = planned_sizes(wanted.num_rows, plan.num_steps_per_rollout)
    if sizes != planned:
        faults.append(Fault(commit_uri, f"batches have {sizes} samples, the plan gives {planned}", WRITTEN_SO))
    order = {sample: row for row, sample in enumerate(wanted["sample_id"].to_pylist())}
    rows = pa.array([order[sample] for sample in batches.table["sample_id"].to_pylist()], pa.int64())
    before = Stack(wanted.take(rows), batches.parts)
    return faults + check_stage("optimize", before, batches) + check_trained(batches)


def _membership(wanted: pa.Table, batches: Stack, commit_uri: str) -> list[Fault]:
    kept, ids = wanted["sample_id"].to_pylist(), batches.table["sample_id"].to_pylist()
    counts = Counter(ids)
    lost = [sample for sample in kept if sample not in counts]
    twice, known = {sample for sample, count in counts.items() if count > 1}, set(kept)
    faults = batches.flagged(pa.array([sample in twice for sample in ids]), "is trained more than once")
    faults += batches.flagged(pa.array([sample not in known for sample in ids]), "is trained and was not kept")
    if lost:
        more = f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
        faults.append(Fault(commit_uri, f"sample {lost[0]} was kept and is in no batch{more}", WRITTEN_SO))
    return faults


def check_trained(batches: Stack) -> list[Fault]:
    """Advantages and old log-probabilities: one finite number a token; and of what not all runs have, where it is."""
    table = batches.table
    tokens = lengths(table, "response_token_ids")
    rules: list[tuple[Any, str]] = []
    for column in ("advantages", "old_logprobs", *_OPTIONAL):
        if column in _OPTIONAL and table[column].null_count == table.num_rows:
            continue
        rules += [
            (pc.not_equal(lengths(table, column), tokens), f"has other than one number for each token in {column}"),
            (not_finite(table, column), f"has a number in {column} that is not finite"),
        ]
    return [fault for mask, what in rules for fault in batches.flagged(mask, what)]


def check_results(record: dict[str, Any], key: str, batches: Stack, commit_uri: str) -> list[Fault]:
    """What came of each batch, for the policy and for a critic if there is one, which may have been trained alone."""
    learnt, critic = record.get("results", []), record.get("critic")
    faults = [] if critic and not learnt else _check_results(learnt, key, batches, commit_uri, "result")
    if critic:
        faults += _check_results(critic["results"], key, batches, commit_uri, "critic result")
    return faults


def _check_results(results: list[dict[str, Any]], key: str, batches: Stack, commit_uri: str, what: str) -> list[Fault]:
    """One result a batch, under the key of its batch, and optimizer steps that count the applied ones."""
    if len(results) != len(batches.parts):
        return [Fault(commit_uri, f"has {len(results)} {what}s for {len(batches.parts)} batches", WRITTEN_SO)]
    faults = []
    for index, (result, (uri, batch)) in enumerate(zip(results, batches.each(), strict=True)):
        if result["key"] != f"{key}-{index:03d}":
            faults.append(Fault(commit_uri, f"{what} {index} has the key of another batch", WRITTEN_SO))
        rows, trained = batch.num_rows, len(trained_lengths(batch))
        samples = result["metrics"].get("samples", rows)
        if samples not in (rows, trained):  # older fakes count those without a token to train
            known = f"{rows} samples, {trained} of them with a token to train"
            faults.append(Fault(uri, f"has {known}, the optimizer counted {samples:g}", WRITTEN_SO))
    for before, after in itertools.pairwise(results):
        if after["optimizer_step"] != before["optimizer_step"] + bool(after["applied"]):
            number = f"{before['optimizer_step']} then {after['optimizer_step']}"
            faults.append(Fault(commit_uri, f"optimizer steps do not count the applied batches: {number}", WRITTEN_SO))
    return faults
