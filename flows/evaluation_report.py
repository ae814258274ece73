"""The report of an evaluation: one HTML file in its folder, made from what it stored alone."""

import json
from dataclasses import dataclass
from importlib.resources import files as package_files

import pyarrow as pa
from jinja2 import Environment

from milepost.flows.evaluation_results import Compared, comparisons, require_evaluation, scored
from milepost.flows.sample_view import turns
from milepost.storage import attempts, files, manifest
from milepost.storage.runs import RunFolder
from milepost.storage.tables import read_table
from milepost.tasks.eval_scores import SetScore

WORST = 5
LONGEST = 1500  # characters of a text


@dataclass(frozen=True)
class Bar:
    """A score with its interval, as shares of the width of the picture."""

    label: str
    mean: float
    low: float
    high: float
    text: str


@dataclass(frozen=True)
class WorstItem:
    """The sample with the lowest score of a prompt that went badly."""

    sample_id: str
    scores: str
    turns: list[tuple[str, str]]
    label: str
    reason: str


def bars(scores: list[SetScore], compared: list[Compared]) -> list[Bar]:
    """One bar a set, and one below it for every evaluation that it was compared with."""
    drawn = []
    for score in scores:
        if score.mean is not None:
            drawn.append((score.name, score.mean, score.low, score.high))
        others = [(other.label, pair) for other in compared for pair in other.sets if pair.name == score.name]
        drawn += [(f"{score.name}, {label}", pair.before, pair.before, pair.before) for label, pair in others]
    lowest = min([0.0, *(low for _, _, low, _ in drawn)])
    width = max([1.0, *(high for *_, high in drawn)]) - lowest
    return [
        Bar(
            label=name,
            mean=(mean - lowest) / width,
            low=(low - lowest) / width,
            high=(high - lowest) / width,
            text=f"{mean:.4f}{_interval(low, high)}",
        )
        for name, mean, low, high in drawn
    ]


def _interval(low: float, high: float) -> str:
    return f" ({low:.4f} to {high:.4f})" if low < high else ""


def worst(table: pa.Table, shown: int = WORST) -> list[WorstItem]:
    """The prompts with the lowest mean score; a sample without a score counts as nothing."""
    groups: dict[str, list[int]] = {}
    for row, group in enumerate(table["group_id"].to_pylist()):
        groups.setdefault(group, []).append(row)
    rewards = table["reward"].to_pylist()

    def score(row: int) -> float:
        return rewards[row] if rewards[row] is not None else 0.0

    ranked = sorted(groups.values(), key=lambda rows: sum(map(score, rows)) / len(rows))[:shown]
    return [_item(table.slice(min(rows, key=score), 1), [rewards[row] for row in rows]) for rows in ranked]


def _item(sample: pa.Table, scores: list[float | None]) -> WorstItem:
    (row,) = sample.to_pylist()
    verdict = json.loads(row["verdict"] or "{}")
    shown = ", ".join("none" if score is None else f"{score:g}" for score in scores)
    said = [(role, text[:LONGEST]) for role, text in turns(row)]
    return WorstItem(row["sample_id"], shown, said, row["label"], verdict.get("reason") or "")


def write_evaluation_report(folder: RunFolder) -> str:
    """Render the report of a finished evaluation, and return where it is."""
    of, closed, sets = require_evaluation(folder), manifest.load(folder, 0), scored(folder)
    compared = comparisons(folder)
    scores = [item.score for item in sets.values()]
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    source = (package_files("milepost.flows") / "evaluation.html.j2").read_text()
    page = environment.from_string(source).render(
        run=folder.run_id,
        label=of.label,
        weights=closed.version_in,
        commit=attempts.current(folder).provenance.commit[:12],
        scores=scores,
        passes=sorted({int(k) for score in scores for k in score.pass_at}),
        bars=bars(scores, compared),
        compared=compared,
        worst={name: worst(read_table(item.table)) for name, item in sets.items()},
    )
    files.publish(folder.report, page.encode(errors="xmlcharrefreplace"), overwrite=True)
    return folder.report
