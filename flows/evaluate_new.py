"""The flow `evaluate-new`: the newest checkpoints of all runs that are not evaluated yet, a few at a time.

What is missing is worked out from what is stored, so it does not matter when it runs, how often, or what was missed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import zip_longest

from prefect import flow
from pydantic import PositiveInt

from milepost.flows.evaluate import evaluate
from milepost.flows.evaluation_request import evaluation_name
from milepost.flows.failure import first_cause, sentence
from milepost.flows.outcome import recorded
from milepost.flows.own_thread import in_own_thread
from milepost.flows.progress import say
from milepost.flows.recipe import absolute_root
from milepost.flows.results import evaluations
from milepost.storage import attempts, checkpoints, lease, manifest
from milepost.storage import runs as stored
from milepost.storage.eval_sets import check_sets, eval_sets, named
from milepost.storage.evaluated import evaluated
from milepost.storage.parameters import EvalSet
from milepost.storage.runs import RunFolder


class SomeFailed(RuntimeError):
    """Checkpoints that could not be evaluated; the others are."""


@dataclass(frozen=True)
class Missing:
    """A checkpoint without an evaluation, and what that is to be called."""

    run: str
    step: int
    name: str


def newest_first(missing: Mapping[str, Sequence[Missing]], limit: int) -> list[Missing]:
    """At most `limit`: the newest checkpoint of each run, then the one before of each, and so on."""
    newest = [sorted(found, key=lambda item: -item.step) for _, found in sorted(missing.items())]
    ranked = [item for rank in zip_longest(*newest) for item in rank if item is not None]
    return ranked[:limit]


def missing_of(folder: RunFolder, root: str, sets: Sequence[EvalSet], settings: Sequence[str]) -> list[Missing]:
    """The whole checkpoints of a run that are not evaluated on `sets`, or on its own when there are none.

    Those that the run itself has evaluated count as such on its own sets.
    """
    record = attempts.current(folder)
    if evaluated(record):
        return []
    chosen = list(sets) or eval_sets(record.parameters.eval)
    done = set() if sets or settings else {item.step for item in evaluations(folder)}
    found = []
    for step in checkpoints.complete(folder, hashes=False) if chosen else []:
        version = checkpoints.load_manifest(folder.checkpoint(step)).version
        name = evaluation_name(folder.run_id, version, chosen, settings)
        if step not in done and not _is_made(stored.run_folder(root, name)):
            found.append(Missing(folder.run_id, step, name))
    return found


def _is_made(folder: RunFolder) -> bool:
    """Finished, or somebody is at it."""
    holder = lease.holder(folder.uri)
    return bool(manifest.finished_steps(folder)) or (holder is not None and holder.works)


def all_missing(root: str, pattern: str, sets: Sequence[EvalSet], settings: Sequence[str]) -> dict[str, list[Missing]]:
    """What is missing of every run that matches; a run that cannot be read is left out, and said so."""
    found = {}
    for folder in stored.run_folders(root):
        if fnmatchcase(folder.run_id, pattern):
            try:
                found[folder.run_id] = missing_of(folder, root, sets, settings)
            except (OSError, ValueError, LookupError, TypeError) as error:  # one bad run must not hide the others
                say(f"run {folder.run_id} is left out: {error}")
    return found


@flow(name="evaluate-new", flow_run_name="evaluate-new {runs}", retries=0)
@recorded
async def evaluate_new(
    runs: str = "*",
    root: str = "runs",
    limit: PositiveInt = 4,
    evals: Sequence[EvalSet] = (),
    config: str = "",
    overrides: tuple[str, ...] = (),
) -> list[str]:
    """Evaluate the newest checkpoints that are not evaluated yet; returns the names of the evaluations.

    Args:
        runs: Which runs, as a pattern of names such as demo-*.
        root: Folder of all runs.
        limit: Evaluations at a time: the newest checkpoint of each run first; the rest is for the next time.
        evals: Data sets, each with sampling and reward of its own; when empty those of each checkpoint's run.
        config: Recipe with what differs from the checkpoint's run, such as its engines.
        overrides: Values that differ, as section.field=value.
    """
    root, sets = absolute_root(root), [named(item) for item in evals]
    check_sets(sets)
    settings = [config, *overrides] if config or overrides else []
    missing = await in_own_thread(all_missing, root, runs, sets, settings)
    chosen, count = newest_first(missing, limit), sum(map(len, missing.values()))
    say(f"{count} checkpoints are not evaluated, {len(chosen)} of them are now")
    failed = []
    for item in chosen:
        try:
            await evaluate(
                checkpoint=f"{item.run}@{item.step}",
                run=item.name,
                root=root,
                evals=sets,
                config=config,
                overrides=overrides,
            )
        except Exception as error:  # the next one may well do
            failed.append(f"{item.run}@{item.step}: {sentence(first_cause(error))}")
    if failed:
        raise SomeFailed("; ".join(failed))
    return [item.name for item in chosen]
