"""`milepost verify`: the check of a whole run, with a bar on a terminal, and what it found as text."""

import json
from dataclasses import asdict

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from milepost.storage import attempts, runs
from milepost.storage.verify import Verification, stored_steps, verify


def audit(root: str, run: str) -> Verification:
    """Verify a run of `root`; the bar is on stderr, and only on a terminal."""
    folder = runs.run_folder(root, run)
    attempts.current(folder)
    console = Console(stderr=True)
    columns = (TextColumn("verify"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("verify", total=len(stored_steps(folder)))
        return verify(folder, advance=lambda steps: bar.advance(task, steps))


def show(found: Verification, *, as_json: bool) -> None:
    """On stdout: one JSON object, or lines that no width of a terminal breaks."""
    if as_json:
        print(json.dumps(asdict(found)))
    else:
        print(render(found))


def render(found: Verification) -> str:
    """Each fault on a line of its own with its file and fix, then the notes and what was checked."""
    lines = [f"{fault.file}: {fault.problem}; {fault.fix}" for fault in found.faults]
    lines += [f"note: {note}" for note in found.notes]
    checked = f"{found.steps} steps, {found.tables} tables, {found.samples} samples, {found.checkpoints} checkpoints"
    verdict = f"{len(found.faults)} faults" if found.faults else "no fault"
    return "\n".join([*lines, f"{found.run}: {verdict} in {checked}"])
