"""A lineage as a Mermaid flow chart, top down from what came first, with a box around each run."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from milepost.flows.lineage import Touched, ends
from milepost.storage.ancestry import Ancestry, StepLink
from milepost.storage.begun import Origin
from milepost.storage.taught import TAUGHT
from milepost.storage.touches import Touch

ROUND, BOX, STORE, HEXAGON = ("([", "])"), ("[", "]"), ("[(", ")]"), ("{{", "}}")
ESCAPES = {"#": "#35;", '"': "#quot;", "<": "#lt;", ">": "#gt;", "`": "#96;", "\n": " "}


@dataclass
class Chart:
    """The lines of a flow chart. Edges come last: one inside a box would draw its ends into it."""

    lines: list[str] = field(default_factory=list)
    edges: list[str] = field(default_factory=list)
    nodes: int = 0

    def node(self, shape: tuple[str, str], *texts: str) -> str:
        """A node with a line for each text that is not empty; returns its name in the chart."""
        self.nodes += 1
        begin, end = shape
        self.lines.append(f'n{self.nodes}{begin}"{"<br/>".join(escaped(text) for text in texts if text)}"{end}')
        return f"n{self.nodes}"

    def box(self, name: str) -> None:
        """What is drawn from here to `end` is inside a box."""
        self.nodes += 1
        self.lines.append(f'subgraph n{self.nodes}["{escaped(name)}"]')

    def end(self) -> None:
        self.lines.append("end")

    def edge(self, begin: str, end: str) -> None:
        self.edges.append(f"{begin} --> {end}")

    def __str__(self) -> str:
        return "\n".join(["flowchart TD", *(f"    {line}" for line in [*self.lines, *self.edges])])


def escaped(text: str) -> str:
    """`text` as a chart shows it, whatever is in it."""
    return "".join(ESCAPES.get(letter, letter) for letter in text)


def mermaid(found: Ancestry | Touched) -> str:
    """The picture of an answer."""
    chart = Chart()
    if isinstance(found, Touched):
        _touched(chart, found)
    else:
        _ancestry(chart, found)
    return str(chart)


def _ancestry(chart: Chart, found: Ancestry) -> str:
    """A checkpoint with all that is behind it; returns its node."""
    before = _behind(chart, found.parent)
    source = _behind(chart, found.source) if found.source else ""
    sets = ", ".join(sorted({prompt.dataset for prompt in found.prompts}))
    graders = sorted({grader for step in found.steps for grader in step.graders})
    chart.box(f"run {found.run}")
    learns = found.data.get(TAUGHT)
    given = [chart.node(STORE, *(_learnt(learns) if learns else (f"{len(found.prompts)} prompts", sets)))]
    given += [chart.node(HEXAGON, "rewards", *graders)] if graders else []
    given += [source] if source else []
    for part_texts in ends(list(_parts(found))):
        part = chart.node(BOX, *(part_texts or ("...",)))
        for came in (before, *given):
            chart.edge(came, part)
        before = part
    number, _, digest = found.version.partition("-")
    texts = (f"{found.run}@{number}", f"weights {digest[:12]}") if found.version else ("samples, no weights",)
    checkpoint = chart.node(ROUND, *texts)
    chart.edge(before, checkpoint)
    chart.end()
    return checkpoint


def _learnt(rows: dict[str, Any]) -> tuple[str, str]:
    return f"{rows['rows'] - rows['too_long']} rows learnt", _last_part(rows["file"])


def _behind(chart: Chart, found: Ancestry | Origin) -> str:
    if isinstance(found, Ancestry):
        return _ancestry(chart, found)
    return chart.node(ROUND, "fine-tuned model" if found.kind == "sft" else found.kind, found.name)


def _parts(found: Ancestry) -> Iterator[tuple[str, ...]]:
    """What to say of the steps of each attempt."""
    attempts = {attempt.number: attempt for attempt in found.attempts}
    for number, steps in groupby(found.steps, key=lambda step: max(step.attempt, 1)):
        attempt, made = attempts[number], list(steps)
        changed = f"changed {', '.join(attempt.changes)}" if attempt.changes else ""
        code = f"commit {attempt.commit[:8] or 'unknown'}{' with a diff' if attempt.diff_digest else ''}"
        yield _steps(made), changed, code, f"{sum(len(step.tables) for step in made)} tables"


def _steps(made: list[StepLink]) -> str:
    first, last = made[0].step, made[-1].step
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _touched(chart: Chart, found: Touched) -> None:
    what = chart.node(STORE, *found.what.split(":", 1))
    of_runs: dict[str, str] = {}
    for touch in found.runs:
        of_runs[touch.run] = chart.node(BOX, f"run {touch.run}", *_of_run(touch))
        chart.edge(of_runs.get(touch.parent.partition("@")[0], what), of_runs[touch.run])
        if touch.checkpoints:
            names = ", ".join("..." if uri is None else _last_part(uri) for uri in ends(touch.checkpoints))
            chart.edge(of_runs[touch.run], chart.node(ROUND, f"checkpoints of {touch.run}", names))


def _of_run(touch: Touch) -> tuple[str, ...]:
    begun = f"began with {touch.parent}" if touch.inherited else ""
    if not touch.served:
        return (begun,)
    trained = f"trained on in {len(touch.trained)} steps" if touch.trained else "never trained on"
    purged = f"purged on {touch.purged}" if touch.purged else ""
    return begun, f"{len(touch.samples)} samples in {len(touch.served)} steps", trained, purged


def _last_part(uri: str) -> str:
    return uri.rstrip("/").rpartition("/")[2]
