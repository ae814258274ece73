"""When a run is to stop, and what it is to tell of. Everything here is pure, and looks at what is stored alone.

So a run that is resumed, or looked at later, decides what it decided when it went on.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Literal

from milepost.storage.eval_sets import eval_sets
from milepost.storage.manifest import StepManifest
from milepost.storage.parameters import Parameters
from milepost.storage.watched import AlertSection, Bound, StopSection

STEP_METRICS = ("rollout/", "train/", "mismatch/", "time/", "sync/")


@dataclass(frozen=True)
class Point:
    """A value of a metric, of weights after so many finished steps."""

    after: int
    value: float


@dataclass(frozen=True)
class History:
    """A run so far: its finished steps in order, and the metrics of its evaluations by finished steps.

    `gpus` is how many each attempt takes for trainer and engines; 1 where it is not known, or takes none. `late` are
    the evaluations of earlier weights that have ended since it was last asked what is crossed.
    """

    steps: Sequence[StepManifest]
    held_out: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    gpus: Mapping[int, int] = field(default_factory=dict)
    late: frozenset[int] = frozenset()

    def points(self, metric: str) -> list[Point]:
        """What is known of a metric up to now, in order."""
        if metric.startswith("eval/"):
            found = [(after, self.held_out[after]) for after in sorted(self.held_out) if after <= len(self.steps)]
        else:
            found = [(step.step + 1, step.metrics) for step in self.steps]
        return [Point(after, metrics[metric]) for after, metrics in found if metric in metrics]


@dataclass(frozen=True)
class Broken:
    """A rule of a run, named by its parameter, and what broke it, in words."""

    rule: str
    reason: str


@dataclass(frozen=True)
class Crossing:
    """A bound that has come to be crossed by the newest value of its metric."""

    bound: Bound
    point: Point
    reason: str


def broken_rule(section: StopSection, history: History) -> Broken | None:
    """Why a run that is so far is to stop; None when it goes on, and before its first step."""
    if not history.steps:
        return None
    rules = {
        "stop.max_tokens": _over(section.max_tokens, tokens(history), "generated tokens"),
        "stop.max_gpu_seconds": _over(section.max_gpu_seconds, gpu_seconds(history), "GPU-seconds"),
        "stop.max_seconds": _over(section.max_seconds, seconds(history), "seconds"),
        "stop.bounds": next((reason for bound in section.bounds if (reason := crossed(bound, history))), ""),
        "stop.plateau_metric": plateau(section, history.points(section.plateau_metric)),
    }
    return next((Broken(rule, reason) for rule, reason in rules.items() if reason), None)


def step_seconds(closed: StepManifest) -> float:
    """How long a step worked: the longest recorded time of each stage, so that no interruption counts."""
    return math.fsum(value for name, value in closed.metrics.items() if name.startswith("time/"))


def seconds(history: History) -> float:
    return math.fsum(map(step_seconds, history.steps))


def gpu_seconds(history: History) -> float:
    return math.fsum(step_seconds(step) * history.gpus.get(max(step.attempt, 1), 1) for step in history.steps)


def tokens(history: History) -> float:
    return math.fsum(step.metrics.get("rollout/tokens", 0.0) for step in history.steps)


def _over(limit: float | None, used: float, unit: str) -> str:
    return "" if limit is None or used < limit else f"{_amount(used)} of {_amount(limit)} {unit} are used up"


def _amount(value: float) -> str:
    """A number for people: whole ones and large ones without decimals."""
    return f"{value:,.0f}" if float(value).is_integer() or value >= 1000 else f"{value:.4g}"


def is_beyond(bound: Bound, value: float) -> bool:
    """A value that is no number crosses every bound."""
    if not math.isfinite(value):
        return True
    return (bound.above is not None and value > bound.above) or (bound.below is not None and value < bound.below)


def _in_a_row(bound: Bound, points: Sequence[Point]) -> int:
    """How many of the newest points cross a bound."""
    return len(list(takewhile(lambda point: is_beyond(bound, point.value), reversed(points))))


def _told(bound: Bound, value: float) -> str:
    sides = {"above": bound.above, "below": bound.below}
    limit = " or ".join(f"{side} {limit:g}" for side, limit in sides.items() if limit is not None)
    times = "" if bound.in_a_row == 1 else f", {bound.in_a_row} times in a row"
    return f"{bound.metric} is {value:g}, which is {limit}{times}"


def crossed(bound: Bound, history: History) -> str:
    """What crosses a bound, in words; empty when nothing does."""
    points = history.points(bound.metric)
    return _told(bound, points[-1].value) if _in_a_row(bound, points) >= bound.in_a_row else ""


def crossings(section: AlertSection, history: History) -> list[Crossing]:
    """The bounds that have come to be crossed at this very step: each once, until its metric has come back."""
    found = ((bound, history.points(bound.metric)) for bound in section.bounds)
    return [
        Crossing(bound, points[-1], _told(bound, points[-1].value))
        for bound, points in found
        if points and _is_new(bound, points[-1], history) and _in_a_row(bound, points) == bound.in_a_row
    ]


def _is_new(bound: Bound, point: Point, history: History) -> bool:
    is_late = bound.metric.startswith("eval/") and point.after in history.late
    return is_late or point.after == len(history.steps)


def plateau(section: StopSection, points: Sequence[Point]) -> str:
    """What has not got better for as long as it may not, in words; empty when it has, or may go on trying."""
    sign = 1.0 if section.plateau_best_is == "highest" else -1.0
    best, since = -math.inf, 0
    for point in points:
        value = sign * point.value
        if value > best and value - best >= section.plateau_improvement:
            best, since = value, 0
        else:
            since += 1
    if since < section.plateau_patience:
        return ""
    least = f" by {section.plateau_improvement:g}" if section.plateau_improvement else ""
    return f"{section.plateau_metric} has not become better than {sign * best:g}{least} {since} times in a row"


def best_of(values: Mapping[int, float], best_is: Literal["highest", "lowest"]) -> Point | None:
    """The best of some values, by finished steps; of equal ones the earliest, and None when there is none."""
    known = [Point(after, value) for after, value in sorted(values.items()) if math.isfinite(value)]
    choose = max if best_is == "highest" else min
    return choose(known, key=lambda point: point.value, default=None)


def watched_metrics(parameters: Parameters) -> dict[str, str]:
    """Every metric that a rule or an alert looks at, with the parameter that names it."""
    stop, found = parameters.stop, {bound.metric: "alert.bounds" for bound in parameters.alert.bounds}
    found |= {bound.metric: "stop.bounds" for bound in stop.bounds}
    return found | ({stop.plateau_metric: "stop.plateau_metric"} if stop.plateau_metric else {})


def check_watched(parameters: Parameters) -> None:
    """ValueError for a metric that a run cannot have: what watches it would wait for ever."""
    section, best = parameters.eval, parameters.checkpoint.best_metric
    sets = [item.name for item in eval_sets(section)] if section.every_steps else []
    known = ", ".join(f"eval/{name}/mean" for name in sets) or "none: set eval.path and eval.every_steps"
    for metric, key in [*watched_metrics(parameters).items(), *([(best, "checkpoint.best_metric")] if best else [])]:
        of_steps = metric.startswith(STEP_METRICS) and metric != best
        if not of_steps and metric.rpartition("/")[0] not in [f"eval/{name}" for name in sets]:
            steps = "" if metric == best else f"steps have {', '.join(STEP_METRICS)}...; "
            raise ValueError(f"{key} has {metric!r}, which is no metric of this run: {steps}evaluations have {known}")
