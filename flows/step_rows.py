"""A step in the few values that people watch: rows of a table, as the page of a run and the terminal show them."""

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

from milepost.flows.results import Evaluation
from milepost.storage.manifest import StepManifest

BLOCKS = "".join(chr(code) for code in range(0x2581, 0x2589))  # from an eighth of a line to all of it
STAGES = ("sample", "generate", "score", "filter", "optimize", "sync")


def learns_only(closed: StepManifest) -> bool:
    """Whether a step has no samples of its own, as those of a fine-tuning: it has a loss to watch, and no reward."""
    return not any(name.startswith("rollout/") for name in closed.metrics)


def step_row(closed: StepManifest, evaluated: Evaluation | None = None) -> dict[str, str]:
    """One finished step. `evaluated` is of the weights that it left; tokens/s is how fast the engines generated."""
    metrics = closed.metrics
    generating = metrics.get("time/generate", 0.0)
    speed = metrics.get("rollout/tokens", math.nan) / generating if generating else math.nan
    return {
        "step": str(closed.step),
        "reward": figure(metrics.get("rollout/reward")),
        "loss": figure(metrics.get("train/loss")) if learns_only(closed) else "",
        "accuracy": figure(evaluated.mean if evaluated else None),
        "length": figure(metrics.get("rollout/response_len/mean"), 1),
        "KL": figure(metrics.get("train/ppo_kl"), 5),
        "tokens/s": figure(speed, 0),
        **{f"{stage} s": figure(metrics[f"time/{stage}"], 2) for stage in STAGES if f"time/{stage}" in metrics},
    }


def step_rows(steps: Iterable[StepManifest], evaluations: Iterable[Evaluation]) -> list[dict[str, str]]:
    """All with the same columns, those without a value left out: the newest step first."""
    by_step = {found.step: found for found in evaluations}
    rows = [step_row(closed, by_step.get(closed.step + 1)) for closed in steps]
    columns = max(rows, key=len, default={})
    named = [name for name in columns if any(row.get(name) for row in rows)]
    return [{name: row.get(name, "") for name in named} for row in reversed(rows)]


def figure(value: float | None, digits: int = 3) -> str:
    """A number for people; empty for one that is not known."""
    return "" if value is None or math.isnan(value) else f"{value:,.{digits}f}"


def sparkline(values: Sequence[float], *, width: int = 60) -> str:
    """A curve in one line of text; many values are averaged to `width` of them."""
    shown = [value for value in thinned(values, width) if math.isfinite(value)]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    span = (high - low) or 1.0
    return "".join(BLOCKS[round((value - low) / span * (len(BLOCKS) - 1))] for value in shown)


def thinned(values: Sequence[float], count: int) -> list[float]:
    """At most `count` values: the means of equal parts."""
    if len(values) <= count:
        return list(values)
    ends = [round(index * len(values) / count) for index in range(count + 1)]
    return [math.fsum(values[a:b]) / (b - a) for a, b in pairwise(ends)]


def duration(seconds: float | None) -> str:
    """A time span for people, in its two largest units; empty for one that is not known."""
    if seconds is None:
        return ""
    whole = max(0, int(seconds))
    for unit, name, smaller, part in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= unit:
            return f"{whole // unit} {name} {whole % unit // smaller} {part}"
    return f"{whole} s"
