"""The report of a run: one HTML file in its folder, made from the stored run alone."""

from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import files as package_files
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from milepost.flows.curve import svg_curve
from milepost.storage import attempts, files, manifest, runs, text
from milepost.storage.accounting import epoch_accounting
from milepost.storage.manifest import StepManifest
from milepost.storage.runs import RunFolder
from milepost.storage.tables import TableRef, read_table

COLUMNS = [
    "rollout/reward",
    "rollout/response_len/mean",
    "rollout/truncated_ratio",
    "rollout/kept_ratio",
    "train/loss",
    "train/grad_norm",
    "train/lr",
    "time/generate",
    "time/score",
    "time/optimize",
]
SAMPLES_SHOWN = 12


@dataclass(frozen=True)
class Evaluation:
    """Held-out accuracy after `step` steps."""

    step: int
    mean: float
    low: float
    high: float
    count: int


def evaluations(folder: RunFolder) -> list[Evaluation]:
    """The evaluations a run has stored, in order of step."""
    place = files.join(folder.uri, "evals")
    found = []
    for name in files.names(place):
        commit = files.join(place, name, "journal", "evaluate-r0.json")
        if files.exists(commit):
            found.append(Evaluation(int(name), **files.read_json(commit)["record"]))
    return found


def finished(folder: RunFolder) -> list[StepManifest]:
    return [manifest.load(folder, step) for step in manifest.finished_steps(folder)]


def curve(steps: list[StepManifest], name: str) -> list[float]:
    return [step.metrics[name] for step in steps if name in step.metrics]


def _figures(steps: list[StepManifest]) -> list[Markup]:
    wanted = {"rollout/reward": "reward", "train/grad_norm": "gradient norm", "rollout/response_len/mean": "tokens"}
    curves = {label: curve(steps, name) for name, label in wanted.items()}
    return [Markup(svg_curve({label: values}, ylabel=label)) for label, values in curves.items() if values]


def last_samples(steps: list[StepManifest]) -> list[dict[str, Any]]:
    """A few scored samples of the newest step, as text."""
    scored = [
        TableRef(**entry["tables"]["rollouts"])
        for entry in (steps[-1].commits if steps else [])
        if entry["slot"].startswith("filter-")
    ]
    if not scored:
        return []
    rows = read_table(scored[0]).slice(0, SAMPLES_SHOWN).to_pylist()
    return [
        {
            "prompt": _shown(text.from_json(row["prompt"])),
            "response": row["response"],
            "label": _shown(text.from_json(row["label"])),
            "reward": row["reward"],
            "reason": text.from_json(row["verdict"] or "{}").get("reason", ""),
        }
        for row in rows
    ]


def _shown(value: Any, limit: int = 400) -> str:
    if isinstance(value, list) and value and isinstance(value[-1], dict):
        value = value[-1].get("content", value[-1])
    shown = value if isinstance(value, str) else text.to_json(value)
    return shown if len(shown) <= limit else shown[:limit] + "..."


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
    steps = finished(folder)
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["figure"] = _figure
    source = (package_files("milepost.flows") / "report.html.j2").read_text()
    page = environment.from_string(source).render(
        run=record.run_id,
        planned=record.steps,
        model=record.parameters.model.path,
        commit=record.provenance.commit[:12],
        steps=steps,
        attempts=attempt_rows(folder, steps),
        columns=[name for name in COLUMNS if any(name in step.metrics for step in steps)],
        evals=evaluations(folder),
        epochs=epoch_accounting(folder),
        figures=_figures(steps),
        samples=last_samples(steps),
    )
    files.publish(folder.report, page.encode(errors="xmlcharrefreplace"), overwrite=True)
    return folder.report
