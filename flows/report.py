"""The report of a run: one HTML file in its folder, made from the stored run alone."""

from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import files as package_files
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from milepost.flows.best import best_line
from milepost.flows.curve import svg_figure
from milepost.flows.evaluation_report import write_evaluation_report
from milepost.flows.report_figures import figures
from milepost.flows.report_samples import ends
from milepost.flows.results import evaluations, finished
from milepost.storage import attempts, files, runs, stops
from milepost.storage.accounting import epoch_accounting
from milepost.storage.ancestry import Ancestry, ancestry
from milepost.storage.evaluated import evaluated
from milepost.storage.manifest import StepManifest
from milepost.storage.runs import RunFolder
from milepost.storage.taught import taught

COLUMNS = [
    "rollout/reward",
    "rollout/response_len/mean",
    "rollout/truncated_ratio",
    "rollout/kept_ratio",
    "train/loss",
    "train/grad_norm",
    "train/lr",
    "mismatch/logprob_abs_diff",
    "mismatch/ess",
    "time/generate",
    "time/score",
    "time/optimize",
]
STEPS_SHOWN = 200  # rows of the table; the figures show all


@dataclass(frozen=True)
class Link:
    """A box of the lineage picture: what it is, its name, and what tells it from others."""

    kind: str
    name: str
    detail: str


def lineage_links(found: Ancestry) -> list[Link]:
    """From what came first to the newest weights."""
    if isinstance(found.parent, Ancestry):
        links = lineage_links(found.parent)
    else:
        links = [Link(found.parent.kind, found.parent.name, "")]
    if taken := [step.taken for step in found.steps if step.taken]:
        stored = f"of its steps {taken[0]['step']} to {taken[-1]['step']}"
        links.append(Link("stored samples", taken[0]["run"], stored))
    sets = ", ".join(sorted({prompt.dataset for prompt in found.prompts}))
    graders = sorted({grader for step in found.steps for grader in step.graders})
    number, _, digest = found.version.partition("-")
    return [
        *links,
        Link("prompts", sets, f"{len(found.prompts)} of them"),
        Link("rewards", ", ".join(graders) or "none", ""),
        Link("steps", f"0 to {len(found.steps) - 1}", f"manifest {found.steps[-1].manifest[:12]}"),
        Link("weights", f"{found.run}@{number}", digest[:12]),
    ]


def attempt_rows(folder: RunFolder, steps: list[StepManifest]) -> list[dict[str, Any]]:
    """How the run began and how it went on each time; `finished` counts the steps that an attempt closed."""
    began, closed = runs.load(folder), Counter(step.attempt for step in steps)
    told = [(1, began.started_at, began.steps, {})]
    told += [(item.number, item.started_at, item.steps, item.changes) for item in attempts.attempts(folder)]
    return [
        {"number": number, "started": _time(at), "steps": planned, "finished": closed[number], "changes": changes}
        for number, at, planned, changes in told
    ]


def _time(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC" if seconds else "unknown"


def _figure(value: float) -> str:
    return f"{value:.4g}"


def write_report(folder: RunFolder) -> str:
    """Render the report of a run, finished or not, and return where it is."""
    record = attempts.current(folder)
    if evaluated(record):
        return write_evaluation_report(folder)
    steps, held_out = finished(folder), evaluations(folder)
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["figure"] = _figure
    source = (package_files("milepost.flows") / "report.html.j2").read_text()
    page = environment.from_string(source).render(
        run=record.run_id,
        planned=record.steps,
        model=record.parameters.model.path,
        commit=record.provenance.commit[:12],
        steps=steps[-STEPS_SHOWN:],
        left_out=max(0, len(steps) - STEPS_SHOWN),
        finished=len(steps),
        stops=stops.stops(folder),
        best=best_line(folder, record.parameters.checkpoint),
        attempts=attempt_rows(folder, steps),
        columns=[name for name in COLUMNS if any(name in step.metrics for step in steps)],
        evals=held_out,
        epochs={} if taught(record) else epoch_accounting(folder),
        figures=[(item.title, Markup(svg_figure(item))) for item in figures(folder, steps, held_out)],
        links=lineage_links(ancestry(folder, len(steps))) if steps else [],
        samples=ends(folder),
    )
    files.publish(folder.report, page.encode(errors="xmlcharrefreplace"), overwrite=True)
    return folder.report
