"""A step as it is stored: its journal by slot, its tables, and its manifest; what cannot be read is a fault."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from milepost.storage import files
from milepost.storage.tables import TableRef
from milepost.storage.tombstones import entombed
from milepost.storage.verify_tables import RESTORE, Fault, Stack, base_name, load_json, load_table, stack

SHARDED = ("generate", "score", "filter")
_SLOT = re.compile(r"([a-z]+)-r(\d+)(?:-s(\d+))?")

SlotKey = tuple[str, int, int]
Entry = dict[str, Any]


Tables = dict[SlotKey, dict[str, tuple[str, pa.Table]]]


@dataclass(frozen=True)
class StoredStep:
    """A step as read: manifests (None where there is none), journal entries and tables by slot."""

    step: int
    uri: str
    manifest: Entry | None
    before: Entry | None
    entries: dict[SlotKey, Entry]
    tables: Tables

    def commit_uri(self, slot: SlotKey) -> str:
        return files.join(self.uri, "journal", f"{self.entries[slot]['slot']}.json")

    def stack(self, stage: str) -> Stack:
        slots = sorted(slot for slot in self.tables if slot[0] == stage)
        return stack([part for slot in slots for part in self.tables[slot].values()])

    def slots(self, stage: str) -> list[SlotKey]:
        return sorted(slot for slot in self.entries if slot[0] == stage)

    def newest(self) -> Stack:
        """Each shard's table of the last stage that it has reached."""
        found: dict[tuple[int, int], tuple[str, pa.Table]] = {}
        for stage in SHARDED:
            for slot in self.slots(stage):
                found[slot[1:]] = self.tables[slot]["rollouts"]
        return stack([found[shard] for shard in sorted(found)])


def parse_slot(text: str) -> SlotKey:
    """Stage, round and shard of a slot's name; -1 for a stage without shards."""
    found = _SLOT.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is not a slot: expected STAGE-rROUND or STAGE-rROUND-sSHARD")
    return found[1], int(found[2]), -1 if found[3] is None else int(found[3])


def read_entries(uri: str, faults: list[Fault]) -> dict[SlotKey, Entry]:
    """The journal of a step by slot."""
    entries: dict[SlotKey, Entry] = {}
    for name in files.names(files.join(uri, "journal")):
        file = files.join(uri, "journal", name)
        found = load_json(file)
        if isinstance(found, Fault):
            faults.append(found)
        elif (
            f"{found.get('slot')}.json" != name
            or not _SLOT.fullmatch(found["slot"])
            or not {"key", "tables", "record"} <= found.keys()
        ):
            faults.append(Fault(file, "is not a commit of the slot that it is named after", RESTORE))
        else:
            entries[parse_slot(found["slot"])] = found
    return entries


def read_tables(uri: str, entries: dict[SlotKey, Entry], faults: list[Fault], *, begun: Collection[str] = ()) -> Tables:
    """The tables of every commit, looked for beside it: a run may have been moved.

    Prompts whose purge has `begun` and not ended are tombstones in some; they are taken for it in all.
    """
    tables: Tables = {}
    for slot, entry in entries.items():
        tables[slot] = {}
        for name, stored in sorted(entry["tables"].items()):
            ref = TableRef(**stored)
            place = files.join(uri, base_name(ref.uri))
            found = load_table(place, ref)
            if isinstance(found, Fault):
                faults.append(found)
            else:
                tables[slot][name] = place, entombed(found, begun) if begun else found
    return tables
