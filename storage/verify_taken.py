"""Groups that a run has taken from another one: each has the samples that it has there, however many those are."""

from collections import Counter

import pyarrow as pa

from milepost.storage import files
from milepost.storage.parent import Taken, beside, taken_from
from milepost.storage.runs import RunFolder
from milepost.storage.tables import TableRef
from milepost.storage.verify_stored import SlotKey, StoredStep
from milepost.storage.verify_tables import WRITTEN_SO, Fault, base_name, load_json, load_table


def samples_vary(stored: StoredStep) -> bool:
    """Whether the samples of a step come from a run that was imported, whose groups may be of any size."""
    return any(taken is not None and not taken.version for _, taken in _taken(stored))


def check_taken(folder: RunFolder, stored: StoredStep) -> list[Fault]:
    """Groups of other sizes than in the run they come from, if that is still there, and as it was."""
    faults = []
    for slot, taken in _taken(stored):
        source = beside(folder, taken.run).step(taken.step) if taken else ""
        there = _source_groups(stored.entries[slot]["slot"], taken, source) if taken else None
        if taken and there is not None:
            faults += _other_sizes(*stored.tables[slot]["rollouts"], there, taken.run)
    return faults


def _taken(stored: StoredStep) -> list[tuple[SlotKey, Taken | None]]:
    return [(slot, taken_from(stored.entries[slot]["record"])) for slot in stored.slots("generate")]


def _other_sizes(uri: str, table: pa.Table, there: Counter[str], run: str) -> list[Fault]:
    here = Counter(table["group_id"].to_pylist())
    group = next((name for name in (*there, *here) if here[name] != there[name]), None)
    if group is None:
        return []
    problem = f"group {group} has {here[group]} samples, and {there[group]} in run {run!r}, which it was taken from"
    return [Fault(uri, problem, WRITTEN_SO)]


def _source_groups(slot: str, taken: Taken, source: str) -> Counter[str] | None:
    """Samples by group in the table that was taken; None where it is not to be had any more."""
    found = load_json(files.join(source, "journal", f"{slot}.json"))
    ref = None if isinstance(found, Fault) else found.get("tables", {}).get("rollouts")
    if not ref or ref["digest"] != taken.tables["rollouts"]:
        return None
    table = load_table(files.join(source, base_name(ref["uri"])), TableRef(**ref))
    return None if isinstance(table, Fault) else Counter(table["group_id"].to_pylist())
