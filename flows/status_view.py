"""How runs stand, for the terminal: a table of all of them, or one in detail."""

import time
from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from milepost.flows.run_detail import RunDetail
from milepost.flows.run_status import PAUSED, QUEUED, RunStatus
from milepost.flows.step_rows import duration, figure, sparkline

COLORS = {
    "running": "green",
    QUEUED: "cyan",
    PAUSED: "magenta",
    "finished": "blue",
    "stopped": "yellow",
    "cancelled": "yellow",
    "crashed": "red",
    "unreadable": "red",
}
BAR_WIDTH = 60
LINE = chr(0x2501)  # a heavy horizontal line
COLUMNS = ("state", "step", "reward", "accuracy", "last commit", "a step", "eta")


def age(status: RunStatus, now: float) -> str:
    return f"{duration(now - status.committed_at)} ago" if status.committed_at else ""


def status_table(statuses: Sequence[RunStatus]) -> RenderableType:
    """A line a run; what is wrong with one that cannot be read stands below."""
    run = Column("run", overflow="fold")  # a name that is cut names nothing
    table, now = Table(run, *COLUMNS, box=None, padding=(0, 2, 0, 0)), time.time()
    for found in statuses:
        seconds = f"{figure(found.step_seconds, 1)} s" if found.step_seconds is not None else ""
        table.add_row(
            found.run,
            Text(found.state, style=COLORS[found.state]),
            f"{found.done}/{found.steps}" if not found.problem else "",
            figure(found.reward),
            figure(found.accuracy),
            age(found, now),
            seconds,
            duration(found.eta_seconds),
        )
    problems = [Text(f"{found.run}: {found.problem}", style="red") for found in statuses if found.problem]
    stops = [Text(f"{found.run} was stopped by a rule: {found.stopped}") for found in statuses if found.stopped]
    return Group(table, *stops, *problems)


def detail_view(found: RunDetail) -> RenderableType:
    """One run: how far it is, what the open step does, the last steps, the curve of all, and where things are."""
    status, now = found.status, time.time()
    head = Text.assemble(
        (status.run, "bold"),
        "  ",
        (status.state, COLORS[status.state]),
        f"  step {status.done} of {status.steps}",
        f", last commit {age(status, now)}" if status.committed_at else "",
        f", eta {duration(status.eta_seconds)}" if status.eta_seconds is not None else "",
    )
    parts: list[RenderableType] = [head, _bar(status)]
    if status.stopped:
        parts.append(Text(f"stopped by a rule: {status.stopped}"))
    if found.stages:
        done = ", ".join(f"{stage} {count}/{whole}" for stage, (count, whole) in found.stages.items())
        parts.append(Text(f"open step {status.done}: {done}"))
    if found.rewards:
        first, last = figure(found.rewards[0]), figure(found.rewards[-1])
        parts.append(Text(f"reward {first} {sparkline(found.rewards)} {last}"))
    if found.rows:
        parts.append(_steps_table(found.rows))
    width = max((len(name) for name in found.places), default=0)
    return Group(*parts, *(Text(f"{name:<{width}}  {place}") for name, place in found.places.items()))


def _bar(status: RunStatus) -> Text:
    filled = round(BAR_WIDTH * min(1.0, status.done / max(1, status.steps)))
    return Text.assemble((LINE * filled, COLORS[status.state]), (LINE * (BAR_WIDTH - filled), "dim"))


def _steps_table(rows: Sequence[Mapping[str, str]]) -> Table:
    """Without the stages that take no time to speak of, so that it fits into 80 columns."""
    names = [name for name in rows[0] if name not in ("sample s", "filter s")]
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in names:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(row[name] for name in names))
    return table
