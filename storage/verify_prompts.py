"""The prompts of a step, served again from the cursor where the step before ended, against those that were stored."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import pyarrow as pa

from milepost.storage import files
from milepost.storage.prompt_order import Cursor, group_id, take
from milepost.storage.tables import read_bytes
from milepost.storage.verify_tables import WRITTEN_SO, Fault

Round = tuple[str, dict[str, Any], tuple[str, pa.Table]]
"""One sample commit: its file, its record, and its prompts with their file."""


@dataclass(frozen=True)
class Served:
    """What a step served: prompt id by group, (epoch, row) of each serving, and the cursor after."""

    prompts: dict[str, str]
    places: list[tuple[int, int]]
    cursor: dict[str, int] | None


@lru_cache(maxsize=2)
def prompt_columns(uri: str) -> tuple[list[str], list[int]]:
    """Prompt ids and rows of a prompt set whose digest has been checked."""
    table = read_bytes(files.read(uri))
    return table["prompt_id"].to_pylist(), table["row"].to_pylist()


def check_served(
    rounds: Sequence[Round],
    cursor: dict[str, int] | None,
    prompts_uri: str,
    *,
    step: int,
    count: int,
    seed: int,
    shuffle: bool,
) -> tuple[Served, list[Fault]]:
    """Each round takes `count` prompts in order from where the one before ended. An unknown `cursor` checks less."""
    ids, rows = prompt_columns(prompts_uri)
    groups: dict[str, str] = {}
    places: list[tuple[int, int]] = []
    faults: list[Fault] = []
    for round_, (commit_uri, record, (table_uri, table)) in enumerate(rounds):
        names = ("group_id", "prompt_id", "row", "epoch")
        stored = list(zip(*(table[name].to_pylist() for name in names), strict=True))
        groups |= {item[0]: item[1] for item in stored}
        places += [(item[3], item[2]) for item in stored]
        if cursor is not None:
            picks, after = take(count, Cursor(**cursor), size=len(ids), seed=seed, shuffle=shuffle)
            wanted = [
                (group_id(step, round_, position), ids[index], rows[index], epoch)
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
    problem = f"serves row {found[2]} of epoch {found[3]} as {found[0]}, row {due[2]} of epoch {due[3]} was due"
    return [Fault(table_uri, problem, WRITTEN_SO)]


def check_epochs(served: Iterable[tuple[int, int]], prompts_uri: str, run_uri: str) -> list[Fault]:
    """Every prompt of an epoch that is over was served exactly once in it; of the last epoch, at most once."""
    _, rows = prompt_columns(prompts_uri)
    counts = Counter(served)
    last = max((epoch for epoch, _ in counts), default=0)
    wrong = [(epoch, row, count) for (epoch, row), count in sorted(counts.items()) if count > 1]
    wrong += [(epoch, row, 0) for epoch in range(last) for row in rows if (epoch, row) not in counts]
    return [
        Fault(run_uri, f"row {row} was served {count} times in epoch {epoch}, it must be once", WRITTEN_SO)
        for epoch, row, count in wrong
    ]
