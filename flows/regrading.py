"""`milepost regrade`: all stored samples scored once more, by another reward or by what the same one has become."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
from rich.console import Console
from rich.table import Table

from milepost.engines.local_graders import LocalGraders
from milepost.flows.progress import progress_bar
from milepost.flows.step_range import step_range
from milepost.storage import attempts, manifest, runs
from milepost.storage.origin import require_own_reward
from milepost.storage.parameters import RewardSection
from milepost.storage.runs import RunFolder
from milepost.storage.schema import ROLLOUTS
from milepost.storage.step_tables import sample_tables
from milepost.storage.tables import TableRef, concat, read_table
from milepost.storage.taught import require_other
from milepost.storage.tombstones import purged_rows
from milepost.tasks.grading import Graders, require_reward, verdicts_of
from milepost.tasks.verdict import Verdict

THRESHOLD = 0.5
EXAMPLES = 5

RIGHT, WRONG, UNSCORED = "right", "wrong", "unscored"
CLASSES = (RIGHT, WRONG, UNSCORED)


@dataclass(frozen=True)
class Flip:
    """A sample that is judged otherwise now. A score is None where there is none, and then `reason` says why."""

    sample_id: str
    step: int
    label: str
    response: str
    stored: float | None
    now: float | None
    reason: str


@dataclass(frozen=True)
class CurvePoint:
    """Mean rewards of a step over the samples that have one; None when none has."""

    step: int
    stored: float | None
    now: float | None


@dataclass(frozen=True)
class Regraded:
    """All samples of some steps under two rewards. `confusion[stored][now]` counts samples by class."""

    run: str
    stored_reward: str
    reward: str
    threshold: float
    samples: int
    confusion: dict[str, dict[str, int]]
    flips: int
    examples: list[Flip]
    curve: list[CurvePoint]

    @property
    def flip_percent(self) -> float:
        return 100.0 * self.flips / self.samples if self.samples else 0.0


def judged(score: float | None, threshold: float) -> str:
    """The class of a score: `right` from the threshold on."""
    if score is None:
        return UNSCORED
    return RIGHT if score >= threshold else WRONG


def step_rollouts(folder: RunFolder, step: int) -> pa.Table:
    """Every sample of a finished step with what it was scored, kept or not; purged ones have nothing left to score."""
    refs = sample_tables(manifest.load(folder, step))
    found = concat([read_table(TableRef(**ref)) for ref in refs], ROLLOUTS)
    return found.filter(pc.invert(purged_rows(found)))


async def regrade_steps(
    folder: RunFolder,
    steps: Sequence[int],
    reward: RewardSection,
    graders: Graders,
    *,
    threshold: float = THRESHOLD,
    advance: Callable[[str], None] = lambda shown: None,
) -> Regraded:
    """Score the samples of `steps` with `reward`; the run stays as it is."""
    counts: Counter[tuple[str, str]] = Counter()
    examples: list[Flip] = []
    curve: list[CurvePoint] = []
    samples = 0
    for step in steps:
        table = await asyncio.to_thread(step_rollouts, folder, step)
        verdicts = await verdicts_of(table, reward, pool=graders)
        stored = table["reward"].to_pylist()
        pairs = [
            (judged(old, threshold), judged(new.score, threshold)) for old, new in zip(stored, verdicts, strict=True)
        ]
        counts.update(pairs)
        if len(examples) < EXAMPLES:
            examples += list(_flips(table, verdicts, pairs))[: EXAMPLES - len(examples)]
        curve.append(CurvePoint(step, _mean(stored), _mean([verdict.score for verdict in verdicts])))
        samples += len(pairs)
        advance(f"{_flipped(counts)} flips of {samples}")
    return Regraded(
        run=folder.run_id,
        stored_reward=attempts.current(folder).parameters.reward.name,
        reward=reward.name,
        threshold=threshold,
        samples=samples,
        confusion={old: {new: counts[old, new] for new in CLASSES} for old in CLASSES},
        flips=_flipped(counts),
        examples=examples,
        curve=curve,
    )


def _flipped(counts: Counter[tuple[str, str]]) -> int:
    return sum(count for (old, new), count in counts.items() if old != new)


def _flips(table: pa.Table, verdicts: list[Verdict], pairs: list[tuple[str, str]]) -> Iterator[Flip]:
    rows = table.select(["sample_id", "step", "label", "response", "reward"]).to_pylist()
    for row, verdict, (old, new) in zip(rows, verdicts, pairs, strict=True):
        if old != new:
            reward = row.pop("reward")
            yield Flip(**row, stored=reward, now=verdict.score, reason=verdict.reason)


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


async def regrade_run(
    run: str, root: str, *, reward: RewardSection | None, steps: str, threshold: float, workers: int | None = None
) -> Regraded:
    """`regrade_steps` on finished steps of a run, with graders of this process's own; the run's own reward if None."""
    folder = runs.run_folder(root, run)
    record = attempts.current(folder)
    require_other(run, record)
    chosen = step_range(steps, len(manifest.finished_steps(folder)))
    wanted = reward or record.parameters.reward
    require_own_reward(run, wanted.name, "say by what to score them now, with --reward")
    with (
        LocalGraders(workers=workers, memory_bytes=wanted.memory_bytes) as graders,
        progress_bar(f"regrade {run}", len(chosen)) as advance,
    ):
        await require_reward(graders, wanted)
        return await regrade_steps(folder, chosen, wanted, graders, threshold=threshold, advance=advance)


def section(reward: str | None, options: str, timeout_seconds: float) -> RewardSection | None:
    """The reward that somebody named on the command line; None for the run's own."""
    try:
        given = json.loads(options)
    except ValueError:
        given = None
    if not isinstance(given, dict):
        raise ValueError(f'--options {options!r} must be a JSON object, such as \'{{"pattern": "[0-9]+"}}\'')
    if reward is None:
        if given:
            raise ValueError("--options are those of --reward: name it too")
        return None
    return RewardSection(name=reward, options=given, by_prompt=False, timeout_seconds=timeout_seconds)


def render(found: Regraded) -> None:
    """Confusion, curves and examples, on the terminal."""
    console = Console()
    confusion = Table("stored \\ now", *CLASSES, title=f"{found.stored_reward} -> {found.reward}", title_justify="left")
    for old, row in found.confusion.items():
        confusion.add_row(old, *(str(row[new]) for new in CLASSES))
    console.print(confusion)
    curves = Table("step", "stored", "now", title="mean reward", title_justify="left")
    for point in found.curve:
        curves.add_row(
            str(point.step), *("" if value is None else f"{value:.4f}" for value in (point.stored, point.now))
        )
    console.print(curves)
    for flip in found.examples:
        scores = " -> ".join("none" if score is None else f"{score:g}" for score in (flip.stored, flip.now))
        said = json.dumps(flip.response[-80:], ensure_ascii=False)
        reason = f" ({flip.reason})" if flip.reason else ""
        print(f"{flip.sample_id}: {scores}{reason}; label {flip.label}, response ends {said}")
    print(f"{found.run}: {found.flips} of {found.samples} samples flip: {found.flip_percent:.2f} %")
