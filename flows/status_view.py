"""How runs stand, for the terminal: a table of all of them, or one in detail."""

import time
from collections.abc import Mapping, Sequence

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from milepost.flows.run_detail import EvaluationDetail, RunDetail
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
WIDE = 200  # columns of a page that is no terminal
GAP = 2  # columns between two of a table
# What is left out first where a table is too wide.
LESSER = ("a step", "last commit", "eta", "accuracy", "reward", "step")
LESSER_OF_STEPS = ("sample s", "filter s", "score s", "sync s", "length", "KL", "tokens/s", "optimize s", "generate s")


def terminal() -> Console:
    """Where a view is printed, line by line as it is: a name or a path that is wrapped or cut names nothing."""
    console = Console(soft_wrap=True, highlight=False)
    return console if console.is_terminal else Console(soft_wrap=True, highlight=False, width=WIDE)


def age(status: RunStatus, now: float) -> str:
    return f"{duration(now - status.committed_at)} ago" if status.committed_at else ""


def status_table(statuses: Sequence[RunStatus], width: int = WIDE) -> RenderableType:
    """A line a run; what is wrong with one that cannot be read stands below."""
    now = time.time()
    rows = [_status_row(found, now) for found in statuses]
    table = _table(rows, fitting(rows, width, LESSER), right=())
    problems = [Text(f"{found.run}: {found.problem}", style="red") for found in statuses if found.problem]
    stops = [Text(f"{found.run} was stopped by a rule: {found.stopped}") for found in statuses if found.stopped]
    return Group(table, *stops, *problems)


def _status_row(found: RunStatus, now: float) -> dict[str, str]:
    return {
        "run": found.run,
        "state": found.state,
        "step": f"{found.done}/{found.steps}" if not found.problem else "",
        "reward": figure(found.reward),
        "accuracy": figure(found.accuracy),
        "last commit": age(found, now),
        "a step": f"{figure(found.step_seconds, 1)} s" if found.step_seconds is not None else "",
        "eta": duration(found.eta_seconds),
    }


def detail_view(found: RunDetail, width: int = WIDE) -> RenderableType:
    """One run: how far it is, what the open step does, the last steps, the curve of all, and where things are."""
    status, now = found.status, time.time()
    head = Text.assemble(
        (status.run, "bold"),
        "  ",
        (status.state, COLORS[status.state]),
        f"  {_standing(found)}",
        f", last commit {age(status, now)}" if status.committed_at else "",
        f", eta {duration(status.eta_seconds)}" if status.eta_seconds is not None else "",
    )
    parts: list[RenderableType] = [head, _bar(found)]
    if status.stopped:
        parts.append(Text(f"stopped by a rule: {status.stopped}"))
    elif found.stopped_by:
        parts.append(Text(f"stopped: {found.stopped_by}"))
    if found.stages:
        done = ", ".join(f"{stage} {count}/{whole}" for stage, (count, whole) in found.stages.items())
        parts.append(Text(f"open step {status.done}: {done}"))
    if found.rewards:
        first, last = figure(found.rewards[0]), figure(found.rewards[-1])
        parts.append(Text(f"reward {first} {sparkline(found.rewards)} {last}"))
    if found.evaluation:
        rows = [row for row in _set_rows(found.evaluation) if any(row.values())]
        parts.append(_table(rows, fitting(rows, width, ()), right=("mean", "prompts x samples", "parts")))
    if found.rows:
        names = fitting(found.rows, width, LESSER_OF_STEPS)
        parts.append(_table(found.rows, names, right=names))
    longest = max((len(name) for name in found.places), default=0)
    return Group(*parts, *(Text(f"{name:<{longest}}  {place}") for name, place in found.places.items()))


def _standing(found: RunDetail) -> str:
    """How much of a run is done, in words."""
    if found.evaluation is None:
        return f"step {found.status.done} of {found.status.steps}"
    done, whole = found.evaluation.progress
    parts = "" if found.status.state == "finished" else f", {done} of {whole} parts"
    return f"evaluation of {found.evaluation.of}{parts}"


def _bar(found: RunDetail) -> Text:
    status = found.status
    done, whole = found.evaluation.progress if found.evaluation else (status.done, status.steps)
    share = 1.0 if status.state == "finished" else min(1.0, done / max(1, whole))
    filled = round(BAR_WIDTH * share)
    return Text.assemble((LINE * filled, COLORS[status.state]), (LINE * (BAR_WIDTH - filled), "dim"))


def _set_rows(found: EvaluationDetail) -> list[dict[str, str]]:
    """A set is scored, or some of its parts are done."""
    scores = {score.name: score for score in found.scores}
    rows = []
    for name, (done, whole) in found.parts.items():
        score = scores.get(name)
        rows.append(
            {
                "set": name,
                "mean": figure(score.mean, 4) if score else "",
                "95 % interval": f"{figure(score.low, 4)} to {figure(score.high, 4)}" if score else "",
                "prompts x samples": f"{score.prompts} x {score.n_samples_per_prompt}" if score else "",
                "parts": "" if score else f"{done}/{whole}",
            }
        )
    return rows


def fitting(rows: Sequence[Mapping[str, str]], width: int, lesser: Sequence[str]) -> list[str]:
    """The columns that have something to show and fit side by side; the first of `lesser` are left out first."""
    names = [name for name in rows[0] if any(row[name] for row in rows)]
    for name in lesser:
        if _width(rows, names) <= width:
            break
        names = [kept for kept in names if kept != name]
    return names


def _width(rows: Sequence[Mapping[str, str]], names: Sequence[str]) -> int:
    cells = [max(cell_len(text) for text in (name, *(row[name] for row in rows))) for name in names]
    return sum(cells) + GAP * (len(names) - 1)


def _table(rows: Sequence[Mapping[str, str]], names: Sequence[str], *, right: Sequence[str]) -> Table:
    """As wide as it has to be, whatever is there to hold it."""
    table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False, width=_width(rows, names))
    for name in names:
        table.add_column(name, justify="right" if name in right else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(row[name], style=COLORS.get(row[name], "") if name == "state" else "") for name in names))
    return table
