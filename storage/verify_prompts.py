"""The prompts of a step, served again from the cursor where the step before ended, against those that were stored."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import pyarrow as pa

from milepost.storage import files
from milepost.storage.carried import carried_groups
from milepost.storage.prompt_mixture import Share, serve
from milepost.storage.prompt_order import Cursor, group_id
from milepost.storage.tables import read_bytes
from milepost.storage.verify_tables import WRITTEN_SO, Fault

Round = tuple[str, dict[str, Any], tuple[str, pa.Table]]
"""One sample commit: its file, its record, and its prompts with their file."""

Place = tuple[str, int, int]
"""One serving: the data set of a prompt, the epoch of that set, and the row."""


@dataclass(frozen=True)
class Served:
    """What a step served: prompt id by group, the place of each serving, and the cursor after."""

    prompts: dict[str, str]
    places: list[Place]
    cursor: dict[str, int] | None


@lru_cache(maxsize=2)
def prompt_columns(uri: str) -> tuple[list[str], list[str], list[int]]:
    """Prompt ids, data sets and rows of stored prompts whose digest has been checked."""
    table = read_bytes(files.read(uri))
    ids, datasets, rows = (table[name].to_pylist() for name in ("prompt_id", "dataset", "row"))
    return ids, datasets, rows


def check_served(
    rounds: Sequence[Round],
    cursor: dict[str, int] | None,
    prompts_uri: str,
    *,
    step: int,
    count: int,
    seed: int,
    shuffle: bool,
    shares: Sequence[Share] = (),
) -> tuple[Served, list[Fault]]:
    """Each round takes `count` prompts in order from where the one before ended. An unknown `cursor` checks less.

    Groups that were carried over from the step before take places of others, and were placed there.
    """
    ids, datasets, rows = prompt_columns(prompts_uri)
    groups: dict[str, str] = {}
    places: list[Place] = []
    faults: list[Fault] = []
    for round_, (commit_uri, record, (table_uri, table)) in enumerate(rounds):
        names = ("group_id", "prompt_id", "dataset", "row", "epoch")
        stored = list(zip(*(table[name].to_pylist() for name in names), strict=True))
        groups |= {item[0]: item[1] for item in stored}
        carried = carried_groups(record)
        stored = [item for item in stored if item[0] not in carried]
        places += [(item[2], item[4], item[3]) for item in stored]
        if cursor is not None:
            fresh = max(0, count - len(carried))
            picks, after = serve(fresh, Cursor(**cursor), size=len(ids), seed=seed, shuffle=shuffle, shares=shares)
            wanted = [
                (group_id(step, round_, position), ids[index], datasets[index], rows[index], epoch)
                for position, (index, epoch) in enumerate(picks)
            ]
            faults += _compare(stored, wanted, table_uri)
            if record["cursor"] != asdict(after):
                faults.append(
                    Fault(commit_uri, f"ends at {record['cursor']}, its prompts at {asdict(after)}", WRITTEN_SO)
                )
        cursor = record["cursor"]
    return Served(groups, places, cursor), faults


def _compare(stored: list[Any], wanted: list[Any], table_uri: str) -> list[Fault]:
    if stored == wanted:
        return []
    if len(stored) != len(wanted):
        return [Fault(table_uri, f"serves {len(stored)} prompts, a round has {len(wanted)}", WRITTEN_SO)]
    place = next(index for index, (left, right) in enumerate(zip(stored, wanted, strict=True)) if left != right)
    found, due = stored[place], wanted[place]
    was, wanted_row = (f"row {item[3]} of epoch {item[4]} of {item[2]!r}" for item in (found, due))
    problem = f"serves {was} as {found[0]}, {wanted_row} was due"
    return [Fault(table_uri, problem, WRITTEN_SO)]


def check_epochs(served: Iterable[Place], prompts_uri: str, run_uri: str) -> list[Fault]:
    """Every prompt of an epoch that is over was served exactly once in it; of the last epoch, at most once.

    Each data set has epochs of its own.
    """
    _, datasets, rows = prompt_columns(prompts_uri)
    counts = Counter(served)
    last = {name: 0 for name in datasets}
    for name, epoch, _ in counts:
        last[name] = max(epoch, last.get(name, 0))
    wrong = [(place, count) for place, count in sorted(counts.items()) if count > 1]
    due = ((name, epoch, row) for name, row in zip(datasets, rows, strict=True) for epoch in range(last[name]))
    wrong += [(place, 0) for place in due if place not in counts]
    return [
        Fault(run_uri, f"row {row} of {name!r} was served {count} times in epoch {epoch}, it must be once", WRITTEN_SO)
        for (name, epoch, row), count in wrong
    ]
