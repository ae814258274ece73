"""What was taken out of a stored run since it was written: one small JSON file a purge, in `purges/` of the run.

A table that holds a purged prompt is replaced in its place by one with tombstones. Journal and manifests keep the
digest that was written; the record of the purge has that and the new one. The record is published before the first
table is replaced, and marked as done after the last thing is: a purge that was killed is explained at every moment.
"""

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

from milepost.storage import files

_FOLDERS = ("steps", "evals", "prompts")


@dataclass(frozen=True)
class PurgedTable:
    """A table that was replaced: its file inside the run, how many of its rows are tombstones, and both digests."""

    file: str
    rows: int
    before: str
    after: str


@dataclass(frozen=True)
class Purge:
    """One purge. `previous` is the digest of the record before it, empty for the first; times are Unix seconds."""

    number: int
    purged_at: float
    reason: str
    prompts: list[str]
    tables: list[PurgedTable]
    previous: str

    @property
    def date(self) -> str:
        return f"{datetime.fromtimestamp(self.purged_at, UTC):%Y-%m-%d}"


def _folder(run_uri: str) -> str:
    return files.join(run_uri, "purges")


def record_uri(run_uri: str, number: int) -> str:
    return files.join(_folder(run_uri), f"{number:06d}.json")


def _done_uri(run_uri: str, number: int) -> str:
    return files.join(_folder(run_uri), f"{number:06d}.done")


def purges(run_uri: str) -> list[Purge]:
    """Every purge of a run, in order; those that did not end included."""
    found = []
    for name in files.names(_folder(run_uri)):
        if name.endswith(".json"):
            content = files.read_json(files.join(_folder(run_uri), name))
            found.append(Purge(**{**content, "tables": [PurgedTable(**table) for table in content["tables"]]}))
    return found


def publish(run_uri: str, prompts: Iterable[str], tables: list[PurgedTable], *, reason: str) -> Purge:
    """Record a purge that is about to be done."""
    before = purges(run_uri)
    previous = files.digest_of(files.read(record_uri(run_uri, before[-1].number))) if before else ""
    found = Purge(len(before) + 1, time.time(), reason, sorted(prompts), tables, previous)
    files.publish_json(record_uri(run_uri, found.number), asdict(found))
    return found


def finish(run_uri: str) -> None:
    """Mark every purge as done."""
    for purge in unfinished(run_uri):
        files.publish(_done_uri(run_uri, purge.number), b"", overwrite=True)


def unfinished(run_uri: str) -> list[Purge]:
    """Purges that were killed before their end."""
    return [purge for purge in purges(run_uri) if not files.exists(_done_uri(run_uri, purge.number))]


def run_and_file(table_uri: str) -> tuple[str, str]:
    """The run that a table is in, and its file there; ('', '') for a table that is in none."""
    parts = table_uri.split("/")
    for depth in (3, 2):  # steps/000000/NAME or evals/000000/NAME, prompts/NAME
        if len(parts) > depth and parts[-depth] in _FOLDERS:
            return "/".join(parts[:-depth]), "/".join(parts[-depth:])
    return "", ""


def of_table(table_uri: str) -> list[Purge]:
    """The purges that replaced a table, in order."""
    run_uri, file = run_and_file(table_uri)
    if not run_uri:
        return []
    return [purge for purge in purges(run_uri) if any(table.file == file for table in purge.tables)]


def explains(table_uri: str, written: str, found: str) -> bool:
    """Whether purges lead from the digest that was written of a table, or how it begins, to the one that it has now."""
    _, file = run_and_file(table_uri)
    known = {written}
    for purge in of_table(table_uri):
        for table in purge.tables:
            if table.file == file and any(table.before.startswith(digest) for digest in known):
                known.add(table.after)
    return found in known


def require_whole(step_uri: str) -> None:
    """ValueError when prompts were purged from a step, whose stages would not come to the same again."""
    parts = step_uri.rstrip("/").split("/")
    run_uri, step = "/".join(parts[:-2]), parts[-1]
    for purge in purges(run_uri):
        if any(table.file.startswith(f"steps/{step}/") for table in purge.tables):
            raise ValueError(
                f"step {int(step)} of run {parts[-3]!r} cannot be run again or trained on: prompts that it had were "
                f"purged on {purge.date}"
            )


def purged_prompts(run_uri: str) -> dict[str, str]:
    """The day on which each purged prompt of a run was purged, by its id."""
    return {prompt: purge.date for purge in reversed(purges(run_uri)) for prompt in purge.prompts}
