"""`milepost replay --set`: what a run would have come to under other rewards, filters or algorithms, step by step.

The samples are the stored ones. The first step starts from the weights that the run had; those after it from what the
changed steps made of them, so from there on the samples are another policy's.
"""

import asyncio
import uuid
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from prefect import flow

from milepost.engines.schedule import check_rates
from milepost.flows.algorithm_checks import check_algorithm
from milepost.flows.off_policy_checks import check_off_policy
from milepost.flows.outcome import recorded
from milepost.flows.progress import progress_bar
from milepost.flows.ray_cluster import joined_ray
from milepost.flows.recipe import absolute_root, parameters_of, with_overrides
from milepost.flows.replay import graders, scratch, trainer_before
from milepost.flows.replay_verdict import stored_step
from milepost.flows.step_range import require_steps, step_range
from milepost.storage import attempts, files, manifest, runs
from milepost.storage.attempts import Changes
from milepost.storage.batch_plan import batch_plan, with_decay_steps
from milepost.storage.journal import Slot, StepStore
from milepost.storage.parameters import Parameters
from milepost.storage.parent import course_of, trained_steps
from milepost.storage.schema import ROLLOUTS
from milepost.storage.stages import Course, Stage
from milepost.storage.tables import TableRef, concat, read_table
from milepost.tasks.filters import kept_groups
from milepost.tasks.optimize import Optimized, optimized
from milepost.tasks.replay import StoredStep, batch_numbers, run_again, stages_from

CHANGEABLE = ("reward", "filter", "algorithm", "off_policy", "reference", "critic", "optimizer")


@dataclass(frozen=True)
class Row:
    """One number of one step, as it was and as it would have been; None where there is none."""

    step: int
    metric: str
    stored: float | None
    now: float | None


def changed(parameters: Parameters, overrides: list[str], *, steps: int) -> tuple[Parameters, Changes]:
    """The parameters with `overrides`, and what differs; ValueError for a section that stored samples cannot answer.

    `steps` is what its trainer takes in all.
    """
    found = parameters_of(with_overrides(parameters.model_dump(mode="json"), overrides))
    found = with_decay_steps(found, steps)
    differs = attempts.changes(parameters, found)
    if not differs:
        raise ValueError(f"--set {' '.join(overrides)} changes nothing: the run had these values")
    for key in differs:
        if key.split(".")[0] not in CHANGEABLE:
            raise ValueError(f"--set {key} would need new samples: a replay can change {', '.join(CHANGEABLE)}")
    check_rates(found)
    check_algorithm(found, batch_plan(found))
    check_off_policy(found, generates=False)
    return found, differs


def first_stage(differs: Changes) -> Stage:
    """The first stage that a change reaches."""
    sections = {key.split(".")[0] for key in differs}
    filters = "filter" in sections or "off_policy.max_staleness" in differs
    return "score" if "reward" in sections else "filter" if filters else "optimize"


def summary(filtered: list[TableRef], done: Optimized | None) -> dict[str, float]:
    """The numbers of a step that are compared."""
    done = done or Optimized([], [])
    table = concat([read_table(ref) for ref in filtered], ROLLOUTS)
    rewards = np.asarray(table["reward"].drop_null(), dtype=float)
    found = {"kept_groups": float(kept_groups(table))}
    if len(rewards):
        found["reward"] = float(rewards.mean())
    trained = [value for ref in done.batches for row in read_table(ref)["advantages"].to_pylist() for value in row[:1]]
    if trained:
        found["advantage_magnitude"] = float(np.abs(trained).mean())
    numbers = batch_numbers(done)
    names = sorted({name for batch in numbers for name in batch} - {"applied"})
    return found | {name: float(np.mean([batch[name] for batch in numbers if name in batch])) for name in names}


def rows_of(step: int, before: dict[str, float], now: dict[str, float]) -> list[Row]:
    return [Row(step, name, before.get(name), now.get(name)) for name in dict.fromkeys([*before, *now])]


def stored_summary(stored: StoredStep) -> dict[str, float]:
    commit, filtered = stored.commits.get(Slot("optimize")), list(stored.rollouts("filter").values())
    return summary(filtered, optimized(commit) if commit else None)


def write_rows(rows: list[Row], out: str) -> None:
    """The rows as Parquet at `out`."""
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist([asdict(row) for row in rows]), sink)
    files.publish(out, sink.getvalue().to_pybytes(), overwrite=True)


@flow(name="what-if", flow_run_name="what if {run}", retries=0)
@recorded
async def what_if(
    run: str, overrides: tuple[str, ...], root: str = "runs", steps: str = "", out: str = ""
) -> dict[str, Any]:
    """Run stored steps again under changed parameters, and say what would have been otherwise; the run stays as it is.

    Args:
        run: Name of the run.
        overrides: What changes, as section.field=value, in reward, filter, algorithm, off_policy, reference,
            critic and optimizer.
        root: Folder of all runs.
        steps: Which finished steps, as a:b; all when empty.
        out: A Parquet file for the rows, if any.
    """
    folder = runs.run_folder(absolute_root(root), run)
    record = require_steps(folder)
    chosen = step_range(steps, len(manifest.finished_steps(folder)))
    parameters, differs = changed(record.parameters, list(overrides), steps=trained_steps(record))
    stages = stages_from(first_stage(differs), Course(last=course_of(record).last))
    name = f"{run}-what-if-{uuid.uuid4().hex[:8]}"
    rows: list[Row] = []
    with ExitStack() as stack:
        stack.enter_context(joined_ray())
        stack.enter_context(graders(name, parameters.reward))
        target = stack.enter_context(scratch(folder))
        advance = stack.enter_context(progress_bar(f"what if {run}", len(chosen)))
        async with trainer_before(folder, record, chosen.start, name, parameters=parameters) as trainer:
            for step in chosen:
                stored, store = stored_step(folder, step, parameters), StepStore(target.step(step), run, step)
                again = await run_again(stored, stages, store, graders=name, trainer=trainer, chained=True)
                filtered = list((again.of("filter") or stored.rollouts("filter")).values())
                now = await asyncio.to_thread(summary, filtered, again.optimized)
                rows += rows_of(step, stored_summary(stored), now)
                advance(f"loss {now.get('loss', float('nan')):.4f}")
    if out:
        write_rows(rows, out)
    return {"run": run, "changes": differs, "rows": [asdict(row) for row in rows]}
