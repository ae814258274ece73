"""The steps of a run that is imported: tables, journal and manifest as a run that trains nothing leaves them."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import pyarrow as pa

from milepost.flows.import_rows import Reader, step_tables
from milepost.storage import manifest
from milepost.storage.accounting import accounting
from milepost.storage.foreign import Group
from milepost.storage.journal import Slot, StepStore
from milepost.storage.manifest import StepManifest
from milepost.storage.parameters import FilterSection, RewardSection
from milepost.storage.prompt_order import Cursor, take
from milepost.storage.runs import RunFolder
from milepost.storage.schema import PROMPTS, ROLLOUTS
from milepost.storage.tables import TableRef, with_columns
from milepost.tasks.filters import filter_table
from milepost.tasks.grading import Graders, verdicts_of, with_verdicts
from milepost.tasks.rollout_metrics import rollout_metrics

_SCORED = ("reward", "rewards", "verdict")
_FILTERED = ("kept", "drop_reason")


@dataclass(frozen=True)
class Scoring:
    """A reward and the processes that it runs in."""

    reward: RewardSection
    graders: Graders


@dataclass(frozen=True)
class Target:
    """Where the steps go, under which parameters, and of how many groups all of them are."""

    folder: RunFolder
    parameters_digest: str
    groups: int


async def write_step(
    target: Target, step: int, reader: Reader, groups: Sequence[Group], cursor: Cursor, *, scoring: Scoring | None
) -> tuple[pa.Table, Cursor]:
    """Commit one step and close it; the prompts that it served, and the cursor after."""
    run = target.folder.run_id
    prompts, samples = step_tables(reader, groups, run_id=run, step=step, first=cursor.served)
    if scoring:
        samples = _without(samples, *_FILTERED)
        verdicts = await verdicts_of(samples, scoring.reward, pool=scoring.graders)
        samples = with_verdicts(samples, verdicts)
    scored = _without(samples, *_FILTERED)
    filtered = filter_table(scored, FilterSection()) if samples["kept"].null_count else samples
    _, after = take(len(groups), cursor, size=target.groups, seed=0, shuffle=False)
    store = StepStore(target.folder.step(step), run, step)
    origin = {"origin": reader.contents.digest}
    ref = _commit(store, Slot("sample"), prompts, [], origin, record={"cursor": asdict(after)})
    ref = _commit(store, Slot("generate", 0, 0), _without(scored, *_SCORED), [ref], origin)
    ref = _commit(store, Slot("score", 0, 0), scored, [ref], origin)
    _commit(store, Slot("filter", 0, 0), filtered, [ref], origin)
    _close(target, store, filtered, accounting(prompts["group_id"].to_pylist(), filtered, None), after)
    return prompts, after


def _without(table: pa.Table, *columns: str) -> pa.Table:
    return with_columns(table, {column: [None] * table.num_rows for column in columns})


def _commit(
    store: StepStore,
    slot: Slot,
    table: pa.Table,
    inputs: list[TableRef],
    config: dict[str, str],
    *,
    record: dict[str, object] | None = None,
) -> TableRef:
    name, schema = ("prompts", PROMPTS) if slot.stage == "sample" else ("rollouts", ROLLOUTS)
    started = time.monotonic()
    ref = store.write(str(slot), table, schema)
    store.commit(slot, store.key(slot, inputs, config), {name: ref}, record=record, started=started)
    return ref


def _close(target: Target, store: StepStore, filtered: pa.Table, counts: dict[str, int], cursor: Cursor) -> None:
    """Publish the manifest. Its weight versions are empty: no weights of this run made the samples."""
    closed = StepManifest(
        run_id=store.run_id,
        step=store.step,
        previous=manifest.manifest_digest(target.folder, store.step - 1),
        version_in="",
        version_out="",
        checkpoint="",
        cursor=asdict(cursor),
        commits=manifest.commit_entries(store.commits()),
        accounting=counts,
        metrics=rollout_metrics(filtered),
        attempt=1,
        parameters_digest=target.parameters_digest,
    )
    manifest.publish(target.folder, closed)
