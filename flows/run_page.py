"""What the page of a flow run shows of its run while it goes on: progress, last steps, reward and samples.

A thread reads the run's folder, as anybody could, every few seconds, and changes the same artifacts in place. No step
waits for it, and a run whose Prefect is gone goes on; what is missed is shown when it answers again.
"""

import base64
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from milepost.flows.artifacts import Artifact, Artifacts
from milepost.flows.curve import FigureData, Series, svg_figure
from milepost.flows.polling import polled
from milepost.flows.results import Evaluation, curve, evaluations
from milepost.flows.run_status import resume_command, step_seconds
from milepost.flows.step_rows import duration, figure, learns_only, step_rows, thinned
from milepost.storage import files, manifest
from milepost.storage.manifest import StepManifest
from milepost.storage.runs import RunFolder
from milepost.storage.tables import TableRef, read_table

POLL_SECONDS = 5.0
SHOWN_STEPS = 20
CURVE_POINTS = 200
SHOWN_SAMPLES = 4  # of each kind
EXCERPT = 50  # characters of a prompt or a response
LABEL_EXCERPT = 20


@dataclass
class RunPage:
    """The page of one flow run, and the steps that it knows of."""

    folder: RunFolder
    root: str
    steps: int
    artifacts: Artifacts
    go_on_with: str = ""
    """What to do when it stops, if not to resume the run."""
    _closed: list[StepManifest] = field(default_factory=list)

    def update(self) -> None:
        """Read the steps that have been finished since, and show how the run stands."""
        if not self._closed:
            picture([0.0], [], "reward")  # imports what draws while engines start, and not during the first steps
        while files.exists(self.folder.manifest(len(self._closed))):
            self._closed.append(manifest.load(self.folder, len(self._closed)))
        found = evaluations(self.folder)
        shown = [self._progress(), *self._last_steps(found), *self._curve(found), *self._samples()]
        self.artifacts.show(shown)

    def _progress(self) -> Artifact:
        done = len(self._closed)
        seconds = step_seconds(self.folder, done) if done < self.steps else None
        eta = f", {duration(seconds * (self.steps - done))} to go" if seconds is not None else ""
        go_on = self.go_on_with or f"`{resume_command(self.folder, self.root)}`"
        about = f"{done} of {self.steps} steps{eta}; if it stops: {go_on}"
        return Artifact("progress", "progress", round(100 * min(1.0, done / max(1, self.steps)), 1), about)

    def _last_steps(self, found: list[Evaluation]) -> Iterator[Artifact]:
        if self._closed:
            rows = step_rows(self._closed[-SHOWN_STEPS:], found)
            told = ", ".join(f"{name} {value}" for name, value in rows[0].items() if value)
            yield Artifact("steps", "table", json.dumps(rows), told)

    def _curve(self, found: list[Evaluation]) -> Iterator[Artifact]:
        """Of rewards; of losses where there are no samples to reward."""
        learns = bool(self._closed) and learns_only(self._closed[-1])
        name, metric = ("loss", "train/loss") if learns else ("reward", "rollout/reward")
        values = curve(self._closed, metric)
        if not values:
            return
        uri = f"data:image/svg+xml;base64,{base64.b64encode(picture(values, found, name).encode()).decode()}"
        text = f"![{name} by step]({uri})\n\nOnce the run has ended its report is `{self.folder.report}`"
        about = f"mean {name}: first {figure(values[0])}, last {figure(values[-1])}"
        yield Artifact(name, "markdown", text, about)

    def _samples(self) -> Iterator[Artifact]:
        if self._closed and (rows := ends(self._closed[-1])):
            see = f"`milepost show {self.folder.run_id} --root {self.root} --sample SAMPLE`"
            about = f"of step {self._closed[-1].step}: the worst and the best; {see} shows all of one"
            yield Artifact("samples", "table", json.dumps(rows), about)


def picture(values: list[float], found: list[Evaluation], name: str) -> str:
    """Reward or loss, and held-out accuracy over steps, as SVG on white: the page behind an image may be dark."""
    drawn = thinned(values, CURVE_POINTS)
    steps = [round(index * len(values) / len(drawn)) for index in range(len(drawn))]
    lines = [Series(name, steps, drawn)]
    if found:
        lines.append(Series("held-out accuracy", [item.step for item in found], [item.mean for item in found]))
    svg = svg_figure(FigureData(name, lines))
    return svg.replace("<svg ", '<svg style="background:white" ', 1)


def ends(closed: StepManifest) -> list[dict[str, Any]]:
    """The worst and the best samples of a step, with the beginning of each prompt and response."""
    wanted = ["sample_id", "reward", "status", "prompt", "label", "response"]
    tables = [
        ref for entry in closed.commits if entry["slot"].startswith("filter-") for ref in entry["tables"].values()
    ]
    rows = [row for ref in tables for row in read_table(TableRef(**ref)).select(wanted).to_pylist()]
    scored = sorted(
        (row for row in rows if row["reward"] is not None), key=lambda row: (row["reward"], row["sample_id"])
    )
    count = min(SHOWN_SAMPLES, len(scored) // 2)
    chosen = [("worst", row) for row in scored[:count]] + [
        ("best", row) for row in reversed(scored[len(scored) - count :])
    ]
    return [
        {
            "kind": kind,
            "reward": figure(row["reward"]),
            "status": row["status"],
            "sample": inert(row["sample_id"]),
            "label": inert(excerpt(as_text(json.loads(row["label"])), LABEL_EXCERPT)),
            "prompt": inert(excerpt(prompt_text(json.loads(row["prompt"])), EXCERPT)),
            "response": inert(excerpt(row["response"], EXCERPT)),
        }
        for kind, row in chosen
    ]


def prompt_text(prompt: Any) -> str:
    """What a prompt asks: of messages the last one."""
    return as_text(prompt[-1].get("content")) if isinstance(prompt, list) and prompt else as_text(prompt)


def as_text(value: Any) -> str:
    """A string as it is, and any other value as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def excerpt(text: str, most: int) -> str:
    """The beginning of a text, on one line."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[:most].rstrip()}..."


def inert(text: str) -> str:
    """Markdown that shows one line of text as it is, whatever is in it: code between more backticks than it has."""
    if not text.strip():
        return ""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * (longest + 1)
    return f"{fence} {text} {fence}" if longest else f"{fence}{text}{fence}"


@contextmanager
def shown(folder: RunFolder, root: str, *, steps: int, flow_run_id: str, go_on_with: str = "") -> Iterator[None]:
    """Inside, the page of this flow run follows the run; nothing where there is no flow run."""
    if not flow_run_id:
        yield
        return
    page = RunPage(folder, root, steps, Artifacts(folder.run_id, flow_run_id), go_on_with)
    with polled(page.update, POLL_SECONDS):
        yield
