"""One run in detail: what its open step has done, its last steps, and where things are."""

from dataclasses import asdict, dataclass, field
from typing import Any

from milepost.flows.best import best_line
from milepost.flows.results import curve, evaluations, finished
from milepost.flows.run_status import LEFT, RunStatus, open_commits, resume_command, run_status
from milepost.flows.step_rows import step_rows
from milepost.storage import attempts, files
from milepost.storage.journal import Slot
from milepost.storage.runs import RunFolder
from milepost.storage.taught import came_of, go_on_with, model_of, taught

LAST_STEPS = 10


@dataclass(frozen=True)
class RunDetail:
    """`stages` has, for each stage of the open step, how many of its parts are committed and how many there are.

    `rows` are the last steps for people, `last_steps` the same steps with all that is known of them, for programs.
    """

    status: RunStatus
    stages: dict[str, tuple[int, int]]
    rows: list[dict[str, str]]
    last_steps: list[dict[str, float]]
    rewards: list[float]
    places: dict[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        found = asdict(self) | asdict(self.status) | {"eta_seconds": self.status.eta_seconds}
        del found["status"], found["rows"]
        return found


def run_detail(folder: RunFolder, root: str) -> RunDetail:
    """LookupError for a run that is not there, ValueError for one that cannot be read."""
    record = attempts.current(folder)
    chosen, learns = record.parameters, taught(record) is not None
    status, closed = run_status(folder), finished(folder)
    if status.problem:
        raise ValueError(f"run {folder.run_id!r} cannot be read: {status.problem}")
    return RunDetail(
        status=status,
        stages={}
        if learns or status.state == "finished"
        else stage_progress(folder, status.done, chosen.rollout.shards),
        rows=step_rows(closed[-LAST_STEPS:], evaluations(folder)),
        last_steps=[{"step": step.step, **step.metrics} for step in closed[-LAST_STEPS:]],
        rewards=curve(closed, "rollout/reward"),
        places=_places(
            folder,
            root,
            status,
            checkpoint=next((step.checkpoint for step in reversed(closed) if step.checkpoint), ""),
            learns=learns,
        )
        | best_line(folder, chosen.checkpoint),
    )


def stage_progress(folder: RunFolder, step: int, shards: int) -> dict[str, tuple[int, int]]:
    """Of the newest sampling round of a step: the parts of each stage that are committed, and how many it has."""
    slots = [Slot.parse(commit.slot) for commit in open_commits(folder, step)]
    newest = max((slot.round for slot in slots), default=0)
    whole = {"sample": 1, "generate": shards, "score": shards, "filter": shards, "optimize": 1}
    done = [slot.stage for slot in slots if slot.round == newest]
    return {stage: (done.count(stage), count) for stage, count in whole.items()} if slots else {}


def _places(folder: RunFolder, root: str, status: RunStatus, *, checkpoint: str, learns: bool) -> dict[str, str]:
    logs = f"milepost logs {folder.run_id} --root {root}"
    found = {"folder": folder.uri, "checkpoint": checkpoint, "logs": logs}
    if learns and came_of(folder):
        found["model"] = model_of(folder)
    if files.exists(folder.report):
        found["report"] = folder.report
    if status.state in LEFT:
        found["go on with"] = go_on_with(folder) if learns else resume_command(folder, root)
    return {name: place for name, place in found.items() if place}
