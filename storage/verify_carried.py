"""Groups that the step before did not finish: each is served again, and nothing that was made of it is changed."""

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from milepost.storage.carried import INTERRUPTED, carried_groups, interrupted_groups
from milepost.storage.parent import taken_from
from milepost.storage.runs import RunFolder
from milepost.storage.verify_stored import StoredStep, read_entries, read_tables
from milepost.storage.verify_tables import WRITTEN_SO, Fault

_MADE = ["group_id", "sample_id", "prompt_id", "status", "response_token_ids", "rollout_logprobs", "finish_reason"]


def carried_here(stored: StoredStep) -> dict[str, str]:
    """The groups of a step that were begun before it, with the ids that they had then."""
    records = (stored.entries[slot]["record"] for slot in stored.slots("sample"))
    return {new: former for record in records for new, former in carried_groups(record).items()}


def check_carried(folder: RunFolder, stored: StoredStep) -> list[Fault]:
    """All that the step before left are there, of the same prompts, and a sample that goes on begins as it was.

    Prompts that were taken from another run are checked there.
    """
    slots, carried = stored.slots("sample"), carried_here(stored)
    left = stored.before["accounting"].get(INTERRUPTED, 0) if stored.before else 0
    if not slots or not (carried or left) or taken_from(stored.entries[slots[0]]["record"]) is not None:
        return []
    before = _rollouts_before(folder, stored.step)
    wanted = interrupted_groups(before)
    if sorted(carried.values()) != sorted(wanted):
        problem = f"goes on with {len(carried)} groups, the step before left {len(wanted)} unfinished"
        return [Fault(stored.commit_uri(slots[0]), problem, WRITTEN_SO)]
    return _check_rows(stored, _by_sample(before, set(wanted)), carried)


def _rollouts_before(folder: RunFolder, step: int) -> list[pa.Table]:
    """Its faults are told where it is checked itself."""
    faults: list[Fault] = []
    uri = folder.step(step - 1)
    entries = {slot: entry for slot, entry in read_entries(uri, faults).items() if slot[0] == "filter"}
    return [found["rollouts"][1] for found in read_tables(uri, entries, faults).values() if found]


def _by_sample(tables: list[pa.Table], groups: set[str]) -> dict[str, dict[str, Any]]:
    wanted = pa.array(sorted(groups), pa.string())
    rows = (table.select(_MADE).filter(pc.is_in(table["group_id"], wanted)).to_pylist() for table in tables)
    return {row["sample_id"]: row for found in rows for row in found}


def _check_rows(stored: StoredStep, before: dict[str, dict[str, Any]], carried: dict[str, str]) -> list[Fault]:
    rows = stored.newest()
    mine = pc.is_in(rows.table["group_id"], pa.array(sorted(carried), pa.string()))
    wrong, own = set(), _own_version(stored)
    for row in rows.table.select([*_MADE, "weight_version_min"]).filter(mine).to_pylist():
        name = carried[row["group_id"]] + row["sample_id"].removeprefix(row["group_id"])
        former = before.get(name)
        if former is None or former["prompt_id"] != row["prompt_id"] or not _goes_on(former, row, own):
            wrong.add(row["sample_id"])
    bad = pc.is_in(rows.table["sample_id"], pa.array(sorted(wrong), pa.string()))
    return rows.flagged(bad, "goes on otherwise than it was left in the step before")


def _own_version(stored: StoredStep) -> int:
    """The number of the weights that a step began with."""
    found = stored.before["version_out"] if stored.before else (stored.manifest or {}).get("version_in", "0-")
    return int(found.partition("-")[0])


def _goes_on(former: dict[str, Any], row: dict[str, Any], own: int) -> bool:
    """A sample that has tokens of weights older than the step's `own` begins with those that were stored of it."""
    oldest = row["weight_version_min"]
    if oldest is None or oldest >= own:
        return True
    count = len(former["response_token_ids"])
    finished = former["finish_reason"] != "abort" and row["response_token_ids"] != former["response_token_ids"]
    return not finished and all(
        row[name][:count] == former[name] for name in ("response_token_ids", "rollout_logprobs")
    )
