"""How a run stands, from its folder: few files are read, and nothing that runs is asked but of a run that is paused."""

import bisect
import statistics
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from milepost.flows.results import latest_evaluation, own_score
from milepost.flows.suspended import since_suspended
from milepost.storage import attempts, files, lease, manifest, runs, stops
from milepost.storage.journal import Commit, StepStore
from milepost.storage.runs import RunFolder

PAUSED = "paused"
QUEUED = "queued"
CANCELLED = "cancelled"
AT_WORK = ("running", QUEUED)  # the states in which a process has the run
LEFT = ("stopped", CANCELLED, "crashed", PAUSED)  # those in which one may take it up

RATE_STEPS = 5
WORKERS = 8  # a run on an object store is many short waits


@dataclass(frozen=True)
class RunStatus:
    """A run in a line of a table. `state` is running, queued for its turn on the engines, paused or cancelled on its
    page, finished, stopped, crashed, or unreadable with the `problem`.

    `committed_at` is when its newest stage was committed, in Unix seconds; `step_seconds` is the median of late steps;
    `stopped` is why a rule of its own has ended it.
    """

    run: str
    state: str
    done: int = 0
    steps: int = 0
    reward: float | None = None
    accuracy: float | None = None
    committed_at: float | None = None
    step_seconds: float | None = None
    problem: str = ""
    stopped: str = ""

    @property
    def eta_seconds(self) -> float | None:
        """Until the last step, for a run that goes on."""
        if self.state != "running" or self.step_seconds is None:
            return None
        return self.step_seconds * max(0, self.steps - self.done)


def finished_count(folder: RunFolder) -> int:
    """Steps that are finished. They are so in order, so a few looks find the last one of many."""

    def is_open(step: int) -> bool:
        return not files.exists(folder.manifest(step))

    high = 1
    while not is_open(high - 1):
        high *= 2
    return bisect.bisect_left(range(high), True, key=is_open)


def run_status(folder: RunFolder) -> RunStatus:
    """The status of one run; one that cannot be read says why."""
    try:
        return _status(folder)
    except (OSError, ValueError, LookupError, TypeError) as error:  # one bad run must not hide the others
        return RunStatus(folder.run_id, "unreadable", problem=str(error))


def _status(folder: RunFolder) -> RunStatus:
    steps, done = planned_steps(folder), finished_count(folder)
    closed = manifest.load(folder, done - 1) if done else None
    evaluated = latest_evaluation(folder)
    stop = stops.stop_after(folder, done) if done < steps else None
    reason = f"{stop.reason} ({stop.rule})" if stop and stop.attempt == attempts.newest(folder) else ""
    state = run_state(folder, done, done if reason else steps)
    return RunStatus(
        run=folder.run_id,
        state=state,
        done=done,
        steps=steps,
        reward=closed.metrics.get("rollout/reward") if closed else None,
        accuracy=evaluated.mean if evaluated else own_score(folder),
        committed_at=committed_at(folder, done),
        step_seconds=step_seconds(folder, done) if state == "running" else None,
        stopped=reason,
    )


def planned_steps(folder: RunFolder) -> int:
    """How many steps the last attempt is to come to; ValueError for a run that a newer milepost wrote."""
    place = files.join(folder.uri, "attempts")
    uri = next((files.join(place, name) for name in reversed(files.names(place))), folder.record)
    content = files.read_json(uri)
    version = content.get("schema_version", 1)
    if version > runs.SCHEMA_VERSION:
        raise ValueError(f"schema version {version} is newer than the {runs.SCHEMA_VERSION} that this milepost knows")
    return int(content["steps"])


def run_state(folder: RunFolder, done: int, steps: int) -> str:
    """What the lease and its heartbeat say, and for a run that nobody has, whether it came to its end.

    One that was paused may have been cancelled since, when no process of it was there to note that.
    """
    holder, noted = lease.holder(folder.uri), lease.noted(folder.uri)
    if holder is not None and holder.works:
        return QUEUED if noted.says == QUEUED else "running"
    if holder is not None and noted.says != PAUSED:
        return "crashed"
    if done >= steps:
        return "finished"
    if noted.says == PAUSED:
        return since_suspended(noted) or PAUSED
    return CANCELLED if noted.says == CANCELLED else "stopped"


def open_commits(folder: RunFolder, step: int) -> list[Commit]:
    """What a step has committed, in order of time."""
    found = StepStore(folder.step(step), folder.run_id, step).commits()
    return sorted(found, key=lambda commit: commit.committed_at)


def committed_at(folder: RunFolder, done: int) -> float | None:
    """When the newest stage was committed, in the step after the `done` finished ones or the last of them."""
    for step in (done, done - 1):
        if step >= 0 and (commits := open_commits(folder, step)):
            return commits[-1].committed_at
    return None


def step_seconds(folder: RunFolder, done: int) -> float | None:
    """The median time between the ends of late steps; one interruption among them does not count."""
    steps = range(max(0, done - RATE_STEPS - 1), done)
    ends = [commits[-1].committed_at for step in steps if (commits := open_commits(folder, step))]
    return statistics.median(after - before for before, after in pairwise(ends)) if len(ends) > 1 else None


def resume_command(folder: RunFolder, root: str) -> str:
    return f"milepost resume {folder.run_id} --root {root}"


def all_statuses(root: str) -> list[RunStatus]:
    """Every run of a root, those that run first, then the one that did something last; an error for no folder."""
    if files.is_local(root) and not Path(root).is_dir():
        raise NotADirectoryError(f"{root} is no folder: name the folder of all runs with --root")
    with ThreadPoolExecutor(WORKERS) as pool:
        found = list(pool.map(run_status, runs.run_folders(root)))
    return sorted(found, key=lambda status: (status.state in AT_WORK, status.committed_at or 0.0), reverse=True)
