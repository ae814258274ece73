"""Replays from the command line, against a Prefect server that is there or is started, and what is shown of them."""

import json
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from milepost.flows.launch import run_flow, serving
from milepost.flows.replay import replay, step_range
from milepost.flows.what_if import changed, what_if
from milepost.storage import attempts, manifest, runs
from milepost.storage.runs import RunFolder
from milepost.tasks.replay import STAGES


def judge(run: str, root: str, *, steps: str, first: str, tolerance: float | None) -> dict[str, Any]:
    """Replay and compare; what cannot be is refused before any server is started."""
    if first not in STAGES:
        raise ValueError(f"--from {first!r} is no stage that can be replayed: give one of {', '.join(STAGES)}")
    _check_steps(runs.run_folder(root, run), steps)
    return _run(lambda: replay(run=run, root=root, steps=steps, first=first, tolerance=tolerance))


def ask(run: str, root: str, overrides: Sequence[str], *, steps: str, out: str) -> dict[str, Any]:
    """What would have been otherwise under `overrides`."""
    folder = runs.run_folder(root, run)
    changed(attempts.current(folder).parameters, list(overrides))
    _check_steps(folder, steps)
    return _run(lambda: what_if(run=run, overrides=tuple(overrides), root=root, steps=steps, out=out))


def _check_steps(folder: RunFolder, steps: str) -> None:
    attempts.current(folder)
    step_range(steps, len(manifest.finished_steps(folder)))


def _run(begin: Callable[[], Coroutine[Any, Any, dict[str, Any]]]) -> dict[str, Any]:
    with serving():
        return run_flow(begin)


def show_verdict(found: dict[str, Any], *, as_json: bool) -> None:
    """The verdict, and a line for every difference."""
    if as_json:
        print(json.dumps(found))
        return
    for stage in found["stages"]:
        if stage["difference"]:
            print(stage["difference"])
    deviation = max((stage["deviation"] for stage in found["stages"]), default=0.0)
    allowed = f", {found['tolerance']:g} is allowed" if found["tolerance"] else ""
    steps = f"steps {found['begin']} to {found['end'] - 1}"
    print(f"{found['run']}: {found['verdict']} in {steps}; largest deviation {deviation:.3g}{allowed}")


def show_changes(found: dict[str, Any], *, as_json: bool) -> None:
    """A row a step; every number as it was and as it would have been."""
    if as_json:
        print(json.dumps(found))
        return
    names = list(dict.fromkeys(row["metric"] for row in found["rows"] if row["stored"] != row["now"]))
    changes = ", ".join(f"{key} {before!r} -> {after!r}" for key, (before, after) in found["changes"].items())
    table = Table("step", *names, title=f"{found['run']} with {changes}", title_justify="left")
    cells = {(row["step"], row["metric"]): _cell(row["stored"], row["now"]) for row in found["rows"]}
    for step in dict.fromkeys(row["step"] for row in found["rows"]):
        table.add_row(str(step), *(cells.get((step, name), "") for name in names))
    Console().print(table if names else f"{found['run']} with {changes}: no number differs")


def _cell(stored: float | None, now: float | None) -> str:
    before, after = ("none" if value is None else f"{value:.4g}" for value in (stored, now))
    return before if before == after else f"{before} -> {after}"
