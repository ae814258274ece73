"""One run in detail: what its open step has done, its last steps, and where things are."""

from dataclasses import asdict, dataclass, field
from typing import Any

from milepost.flows.best import best_line
from milepost.flows.evaluation_results import scored
from milepost.flows.log_view import stop_reason
from milepost.flows.results import curve, evaluations, finished
from milepost.flows.run_status import LEFT, RunStatus, open_commits, resume_command, run_status
from milepost.flows.step_rows import step_rows
from milepost.storage import attempts, files
from milepost.storage.eval_sets import set_rows, shard_count
from milepost.storage.evaluated import evaluated
from milepost.storage.journal import Slot
from milepost.storage.parent import course_of
from milepost.storage.runs import RunFolder, RunRecord
from milepost.storage.stages import STAGES, WHOLE, Course
from milepost.storage.tables import TableRef, read_table
from milepost.storage.taught import came_of, go_on_with, model_of, taught
from milepost.tasks.eval_scores import SetScore

LAST_STEPS = 10


@dataclass(frozen=True)
class EvaluationDetail:
    """What an evaluation is `of`, the sets that are scored, and the parts of each set: how many are, of how many."""

    of: str
    scores: list[SetScore]
    parts: dict[str, tuple[int, int]]

    @property
    def progress(self) -> tuple[int, int]:
        """Parts of all sets: done, and to do."""
        return sum(done for done, _ in self.parts.values()), sum(whole for _, whole in self.parts.values())


@dataclass(frozen=True)
class RunDetail:
    """`stages` has, for each stage of the open step, how many of its parts are committed and how many there are.

    `rows` are the last steps for people, `last_steps` the same steps with all that is known of them, for programs.
    `stopped_by` is what its log says of why its last process ended, for a run that is stopped.
    """

    status: RunStatus
    stages: dict[str, tuple[int, int]]
    rows: list[dict[str, str]]
    last_steps: list[dict[str, float]]
    rewards: list[float]
    places: dict[str, str] = field(default_factory=dict)
    evaluation: EvaluationDetail | None = None
    stopped_by: str = ""

    def as_json(self) -> dict[str, Any]:
        found = asdict(self) | asdict(self.status) | {"eta_seconds": self.status.eta_seconds}
        del found["status"], found["rows"]
        return found


def run_detail(folder: RunFolder, root: str) -> RunDetail:
    """LookupError for a run that is not there, ValueError for one that cannot be read."""
    record = attempts.current(folder)
    chosen, learns, evaluation = record.parameters, taught(record) is not None, evaluation_detail(folder, record)
    status, closed = run_status(folder), finished(folder)
    if status.problem:
        raise ValueError(f"run {folder.run_id!r} cannot be read: {status.problem}")
    return RunDetail(
        status=status,
        stages={}
        if learns or evaluation or status.state == "finished"
        else stage_progress(folder, status.done, chosen.rollout.shards, course_of(record)),
        rows=[] if evaluation else step_rows(closed[-LAST_STEPS:], evaluations(folder)),
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
        evaluation=evaluation,
        stopped_by=stop_reason(folder) if status.state == "stopped" else "",
    )


def evaluation_detail(folder: RunFolder, record: RunRecord) -> EvaluationDetail | None:
    """How an evaluation stands; None for a run that is none."""
    of = evaluated(record)
    if of is None:
        return None
    prompts = read_table(TableRef(**record.data["prompts"]))
    slots = [Slot.parse(commit.slot) for commit in open_commits(folder, 0)]
    parts = {}
    for index, item in enumerate(record.parameters.eval.sets):
        done = sum(slot.stage == "score" and slot.round == index for slot in slots)
        parts[item.name] = (done, shard_count(item, set_rows(prompts, item.name).num_rows))
    return EvaluationDetail(of.label, [found.score for found in scored(folder).values()], parts)


def stage_progress(folder: RunFolder, step: int, shards: int, course: Course = WHOLE) -> dict[str, tuple[int, int]]:
    """Of the newest sampling round of a step: the parts of each stage that are committed, and how many it has.

    The stages that come after the run's course are left out.
    """
    slots = [Slot.parse(commit.slot) for commit in open_commits(folder, step)]
    newest = max((slot.round for slot in slots), default=0)
    whole = {"sample": 1, "generate": shards, "score": shards, "filter": shards, "optimize": 1}
    done = [slot.stage for slot in slots if slot.round == newest]
    stages = STAGES[: STAGES.index(course.last) + 1]
    return {stage: (done.count(stage), whole[stage]) for stage in stages} if slots else {}


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
