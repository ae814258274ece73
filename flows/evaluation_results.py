"""What evaluations have come to, read from what they stored: the score of every set, and two of them side by side."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from milepost.storage import attempts, files, manifest
from milepost.storage.evaluated import Evaluated, evaluated
from milepost.storage.journal import StepStore
from milepost.storage.registry import nearest
from milepost.storage.runs import RunFolder
from milepost.storage.tables import TableRef, read_table
from milepost.tasks.eval_scores import SetScore, items
from milepost.tasks.paired import Paired, paired


@dataclass(frozen=True)
class ScoredSet:
    """One data set of an evaluation: its score, and the table of all its samples."""

    score: SetScore
    table: TableRef


@dataclass(frozen=True)
class Compared:
    """An evaluation against another one, set by set."""

    run: str
    label: str
    sets: list[Paired]


def require_evaluation(folder: RunFolder) -> Evaluated:
    """What the evaluation is of; ValueError for a run that is none, or is not finished."""
    found = evaluated(attempts.current(folder))
    if found is None:
        raise ValueError(f"{folder.run_id!r} is a run and no evaluation: give one of its checkpoints, as RUN@STEP")
    if not manifest.finished_steps(folder):
        raise ValueError(f"evaluation {folder.run_id!r} is not finished: `milepost resume {folder.run_id}` goes on")
    return found


def is_evaluation(folder: RunFolder) -> bool:
    return files.exists(folder.record) and evaluated(attempts.current(folder)) is not None


def scored(folder: RunFolder) -> dict[str, ScoredSet]:
    """Every set that is scored, by name and in order."""
    commits = StepStore(folder.step(0), folder.run_id, 0).commits()
    found = (commit for commit in commits if commit.slot.startswith("evaluate-"))
    sets = [ScoredSet(SetScore(**commit.record), commit.tables["rollouts"]) for commit in found]
    order = [item.name for item in attempts.current(folder).parameters.eval.sets]
    return {item.score.name: item for item in sorted(sets, key=lambda item: order.index(item.score.name))}


def shared_sets(names: Sequence[str], before: RunFolder) -> list[str]:
    """The sets that a finished evaluation has, too; ValueError when it has none of them."""
    known = list(scored(before))
    shared = [name for name in names if name in known]
    if not shared:
        hint = nearest(names[0], known)
        raise ValueError(f"evaluation {before.run_id!r} has none of the data sets {list(names)}, it has {known}{hint}")
    return shared


def compare(now: RunFolder, before: RunFolder) -> Compared:
    """The sets that two finished evaluations share, prompt by prompt; what was found is kept beside `now`."""
    of = require_evaluation(before)
    new, old = scored(now), scored(before)
    shared = shared_sets(list(new), before)
    found = [paired(name, items(read_table(old[name].table)), items(read_table(new[name].table))) for name in shared]
    compared = Compared(before.run_id, of.label, found)
    files.publish_json(_comparison(now, before.run_id), asdict(compared), overwrite=True)
    return compared


def _comparison(folder: RunFolder, other: str) -> str:
    return files.join(folder.uri, "comparisons", f"{other}.json")


def comparisons(folder: RunFolder) -> list[Compared]:
    """Every comparison that was made of an evaluation."""
    place = files.join(folder.uri, "comparisons")
    stored = [files.read_json(files.join(place, name)) for name in files.names(place)]
    return [Compared(item["run"], item["label"], [Paired(**pair) for pair in item["sets"]]) for item in stored]


def summary(folder: RunFolder, compared: Compared | None) -> dict[str, Any]:
    """An evaluation in plain values."""
    closed, of = manifest.load(folder, 0), require_evaluation(folder)
    return {
        "run": folder.run_id,
        "folder": folder.uri,
        "checkpoint": of.label,
        "weights": closed.version_in,
        "sets": [asdict(item.score) for item in scored(folder).values()],
        "compared": asdict(compared) if compared else None,
        "report": folder.report,
    }


def regressions(compared: Mapping[str, Any] | None, max_drop: float) -> list[str]:
    """A clause for every set that fell by more than `max_drop`, and not by chance."""
    found = [Paired(**item) for item in compared["sets"]] if compared else []
    return [
        f"{item.name} fell by {-item.difference:.4f} (p = {item.p:.2g})" for item in found if item.dropped(max_drop)
    ]
