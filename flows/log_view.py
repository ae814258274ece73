"""The logs of a run's processes in the terminal: one stream in order of time, followed for as long as the run lasts."""

import logging
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from rich.console import Console
from rich.text import Text

from milepost.flows.run_status import AT_WORK, QUEUED, run_status
from milepost.storage import lease, runs
from milepost.storage.process_logs import STOPS, Entry, Tail, replaced
from milepost.storage.registry import nearest
from milepost.storage.runs import RunFolder

POLL_SECONDS = 0.5
GRACE_SECONDS = 3.0  # in which the next attempt at a run may begin
LEVELS = ("debug", "info", "warning", "error")
STYLES = {logging.WARNING: "yellow", logging.ERROR: "red", logging.CRITICAL: "red"}


def chosen(folder: RunFolder, *, process: str, level: str, follow: bool) -> Iterator[Entry]:
    """The entries asked for; LookupError for a run or a process that there is none of, ValueError for a level."""
    runs.load(folder)
    if level not in LEVELS:
        raise ValueError(f"level {level!r} is none of {', '.join(LEVELS)}")
    known = [path.name.removesuffix(".log") for path in sorted(Path(folder.logs).glob("*.log"))]
    if not known and not follow:
        raise LookupError(_nothing_logged(folder))
    if process and process not in known and not follow:
        raise LookupError(f"no process {process!r} has logged{nearest(process, known) or f'; known: {known}'}")
    least = logging.getLevelNamesMapping()[level.upper()]
    entries = _followed(folder) if follow else iter(_written(folder, Tail(folder.logs)))
    return (entry for entry in entries if entry.level >= least and process in ("", entry.process))


def _nothing_logged(folder: RunFolder) -> str:
    """What to say of a run without logs. A run on a local folder logs into it, any other into a workspace."""
    if folder.workspace != folder.uri:
        return (
            f"no process of run {folder.run_id!r} has logged into {folder.logs}: look on the machine that has its "
            "workspace, or set MILEPOST_WORKSPACE as it was for the run"
        )
    state = run_status(folder).state
    begun = f"run {folder.run_id!r} is {state} and has logged nothing yet"
    if state == QUEUED:
        return f"{begun}: it waits for its turn on the engines, and `milepost logs {folder.run_id} -f` waits with it"
    if state in AT_WORK:
        return f"{begun}: `milepost logs {folder.run_id} -f` shows what comes"
    return f"{begun}: `milepost status {folder.run_id}` shows more"


def stop_reason(folder: RunFolder) -> str:
    """Why the last process of a run ended, in the words of its own log; empty where none says so."""
    fence = lease.newest_fence(folder.uri)
    since = lease.read_claim(folder.uri, fence).claimed_at if fence else 0.0
    said = [
        entry.message.removeprefix(STOPS).splitlines()[0]
        for entry in Tail(folder.logs).read()
        if entry.process == "flow" and entry.message.startswith(STOPS) and entry.time >= since
    ]
    return said[-1] if said else ""


def _followed(folder: RunFolder) -> Iterator[Entry]:
    """What is there and what comes, until nobody has worked on the run for a few seconds."""
    tail, alone = Tail(folder.logs), GRACE_SECONDS
    yield from _written(folder, tail)
    while True:
        works = _works(folder)
        yield from tail.read()
        alone = 0.0 if works else alone + POLL_SECONDS
        if alone > GRACE_SECONDS:
            return
        time.sleep(POLL_SECONDS)


def _written(folder: RunFolder, tail: Tail) -> list[Entry]:
    """All that is there."""
    return sorted([*replaced(folder.logs), *tail.read()], key=lambda entry: entry.time)


def _works(folder: RunFolder) -> bool:
    holder = lease.holder(folder.uri)
    return holder is not None and holder.works


def show(entries: Iterable[Entry]) -> None:
    console = Console(soft_wrap=True, highlight=False)
    for entry in entries:
        console.print(Text(str(entry), style=STYLES.get(entry.level, "")))
