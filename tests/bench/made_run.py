"""A run made without engines, by the functions that store real ones: for tests and benchmarks of what reads runs."""

import random
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from milepost.storage import checkpoints, files, manifest, runs
from milepost.storage.accounting import accounting
from milepost.storage.batch_plan import batch_plan
from milepost.storage.checkpoints import CheckpointRef
from milepost.storage.journal import Slot, StepStore
from milepost.storage.micro_batches import micro_batches, packing_rules, trained_lengths
from milepost.storage.parameters import Parameters
from milepost.storage.prompt_mixture import Share, serve, shares_entry
from milepost.storage.prompt_order import Cursor, prompt_table
from milepost.storage.provenance import Provenance
from milepost.storage.runs import RunFolder, RunRecord
from milepost.storage.schema import PROMPTS, ROLLOUTS, from_rows
from milepost.storage.tables import concat, with_columns, write_table
from milepost.storage.weight_version import WeightVersion
from milepost.tasks.filters import filter_table
from milepost.tasks.optimize import batches, first_groups
from milepost.tasks.prepare import with_advantages


@dataclass(frozen=True)
class MadeRun:
    """Where a made run is and what it was made with."""

    folder: RunFolder
    parameters: Parameters
    prompts: pa.Table
    shares: tuple[Share, ...] = ()

    def step(self, step: int) -> Path:
        return Path(self.folder.step(step))

    def table(self, step: int, name: str) -> Path:
        """The table of `step` whose name begins with `name`."""
        (found,) = self.step(step).glob(f"{name}-*.parquet")
        return found

    def copied(self, root: Path) -> "MadeRun":
        """The same run in another root, for a test to change: making one takes twenty times as long."""
        folder = runs.run_folder(str(root), self.folder.run_id)
        shutil.copytree(self.folder.uri, folder.uri)
        return replace(self, folder=folder)


def version(step: int) -> WeightVersion:
    return WeightVersion(step, files.digest_of(str(step).encode())[:32])


def begin_run(
    root: str,
    *,
    prompts: int = 12,
    groups: int = 4,
    samples: int = 2,
    tokens: int = 5,
    shards: int = 2,
    shares: Sequence[Share] = (),
) -> MadeRun:
    """A run that has no step yet. With `shares` its prompts are those of several sets."""
    folder = runs.run_folder(root, "made")
    parameters = Parameters.model_validate(
        {
            "data": {"rollout_batch_size": groups, "n_samples_per_prompt": samples, "seed": 7},
            "algorithm": {"num_steps_per_rollout": 2, "old_logprobs": "rollout"},
            "rollout": {"shards": shards, "max_new_tokens": tokens},
            "filter": {"group": "nonzero_std"},
        }
    )
    rows = [(share.name, row) for share in shares for row in range(share.rows)] or [
        ("d", row) for row in range(prompts)
    ]
    table = from_rows([_prompt(*row) for row in rows], PROMPTS)
    ref = write_table(folder.prompts("train"), table, PROMPTS)
    nothing = files.digest_of(b"")
    record = RunRecord(
        run_id="made",
        steps=100,
        parameters=parameters,
        parameters_digest=runs.parameters_digest(parameters),
        provenance=Provenance("", "", [], nothing),
        data={"prompts": asdict(ref), "eval": None, "too_long": 2, "bad_lines": 1, **shares_entry(shares)},
        model={"path": "", "folder": str(Path(__file__).parent), "config": {}},
    )
    runs.create(folder, record)
    return MadeRun(folder, parameters, table, tuple(shares))


def _prompt(dataset: str, row: int) -> dict[str, object]:
    return {
        "prompt_id": f"{row:032x}" if dataset == "d" else files.digest_of(f"{dataset} {row}".encode())[:32],
        "group_id": "",
        "dataset": dataset,
        "row": row,
        "epoch": 0,
        "prompt": f'"{row}+1="',
        "prompt_token_ids": [1, 2, 3],
        "label": '"2"',
        "metadata": "{}",
    }


def add_step(made: MadeRun, step: int, **changed: dict[str, Any]) -> None:
    """One finished step. `changed` replaces values of each sample's row at a stage: `generate={"seed": 4}`."""
    store = StepStore(made.folder.step(step), "made", step)
    plan = batch_plan(made.parameters)
    before = manifest.load(made.folder, step - 1).cursor if step else {}
    picks, cursor = serve(
        plan.rollout_batch_size, Cursor(**before), size=made.prompts.num_rows, seed=7, shares=made.shares
    )
    served = prompt_table(made.prompts, picks, step=step, round_=0)
    _commit(store, Slot("sample"), {"prompts": served}, PROMPTS, record={"cursor": asdict(cursor)})
    shards = made.parameters.rollout.shards
    filtered = [
        _shard(store, served.take(list(range(shard, served.num_rows, shards))), shard, made.parameters, changed)
        for shard in range(shards)
    ]
    trained = _optimize(store, made.parameters, filtered, changed.get("optimize", {}))
    counts = accounting(served["group_id"].to_pylist(), concat(filtered, ROLLOUTS), trained)
    _close(made, store, cursor, counts)


def _commit(
    store: StepStore,
    slot: Slot,
    tables: dict[str, pa.Table],
    schema: pa.Schema,
    *,
    record: dict[str, Any] | None = None,
) -> str:
    key = store.key(slot, [], {})
    refs = {name: store.write(f"{slot}-{name}", table, schema) for name, table in tables.items()}
    store.commit(slot, key, refs, record=record, started=time.monotonic())
    return key


def _shard(
    store: StepStore, prompts: pa.Table, shard: int, parameters: Parameters, changed: dict[str, dict[str, Any]]
) -> pa.Table:
    generated = from_rows(
        [row | changed.get("generate", {}) for row in _samples(store, prompts, shard, parameters)], ROLLOUTS
    )
    _commit(store, Slot("generate", 0, shard), {"rollouts": generated}, ROLLOUTS)
    scored = _scored(generated)
    scored = _changed(scored, changed.get("score", {}))
    _commit(store, Slot("score", 0, shard), {"rollouts": scored}, ROLLOUTS)
    filtered = _changed(filter_table(scored, parameters.filter), changed.get("filter", {}))
    _commit(store, Slot("filter", 0, shard), {"rollouts": filtered}, ROLLOUTS)
    return filtered


def _scored(table: pa.Table) -> pa.Table:
    """Half of a group solves its prompt, but for every fourth group, which the filter drops."""
    groups = table["group_id"].to_pylist()
    rewards = [0.0 if int(group[-4:]) % 4 == 3 else float(row % 2) for row, group in enumerate(groups)]
    parts = [[("made", reward)] for reward in rewards]
    return with_columns(table, {"reward": list(rewards), "rewards": list(parts), "verdict": ["{}"] * len(groups)})


def _changed(table: pa.Table, values: dict[str, Any]) -> pa.Table:
    if not values:
        return table
    return from_rows([row | values for row in table.to_pylist(maps_as_pydicts="strict")], ROLLOUTS)


def _samples(store: StepStore, prompts: pa.Table, shard: int, parameters: Parameters) -> list[dict[str, Any]]:
    stamp, tokens = version(store.step), parameters.rollout.max_new_tokens
    noise = random.Random(f"{store.step} {shard}")
    shared = {"run_id": store.run_id, "step": store.step, "shard": shard, "turns": 1, "seed": 1, "sampling": "{}"}
    return [
        {
            **shared,
            **{name: prompt[name] for name in ("group_id", "prompt_id", "dataset", "prompt", "label", "metadata")},
            "prompt_token_ids": prompt["prompt_token_ids"],
            "sample_id": f"{prompt['group_id']}-{index:03d}",
            "response": "2" * tokens,
            "response_escaped": False,
            "response_token_ids": noise.choices(range(250), k=tokens),
            "loss_mask": [1] * tokens,
            "rollout_logprobs": [-noise.random() for _ in range(tokens)],
            "finish_reason": "stop",
            "status": "completed",
            "weight_version_min": stamp.step,
            "weight_version_max": stamp.step,
            "weights_digest": stamp.digest[:16],
        }
        for prompt in prompts.to_pylist()
        for index in range(parameters.data.n_samples_per_prompt or 1)
    ]


def _optimize(store: StepStore, parameters: Parameters, filtered: list[pa.Table], changed: dict[str, Any]) -> set[str]:
    """Commit the batches of a step; returns the groups in them."""
    plan = batch_plan(parameters)
    chosen = first_groups(concat(filtered, ROLLOUTS), plan.rollout_batch_size)
    table = with_advantages(chosen, parameters.algorithm)
    index = ROLLOUTS.get_field_index("old_logprobs")
    table = table.set_column(index, ROLLOUTS.field(index), table["rollout_logprobs"])
    parts = [_changed(part, changed) for part in batches(table, plan.num_steps_per_rollout)]
    slot = Slot("optimize")
    key = store.key(slot, [], {})
    results = [
        {
            "key": f"{key}-{number:03d}",
            "applied": True,
            "optimizer_step": 2 * store.step + number + 1,
            **_cut(part, parameters),
        }
        for number, part in enumerate(parts)
    ]
    named = {f"batch-{number:03d}": part for number, part in enumerate(parts)}
    _commit(store, slot, named, ROLLOUTS, record={"results": results})
    return set(table["group_id"].to_pylist())


def _cut(part: pa.Table, parameters: Parameters) -> dict[str, Any]:
    """What a trainer says of how it cut a batch."""
    lengths = trained_lengths(part)
    cut = micro_batches(lengths, packing_rules(parameters.model, parameters.perf))
    return {"metrics": cut.metrics(lengths), "micro_batches": cut.to_json()}


def _close(made: MadeRun, store: StepStore, cursor: Cursor, counts: dict[str, int]) -> None:
    """Save a checkpoint of the step, and publish its manifest."""
    step, folder = store.step, made.folder
    commits = {commit.slot: commit for commit in store.commits()}
    optimize = commits["optimize-r0"]
    uri = folder.trainer_state(step + 1)
    files.publish_json(files.join(uri, "state.json"), {"step": step}, overwrite=True)
    checkpoints.publish(folder, CheckpointRef(uri, version(step + 1), f"{optimize.key}-{len(optimize.tables) - 1:03d}"))
    into, out = version(step), version(step + 1)
    manifest.publish(
        folder,
        manifest.StepManifest(
            run_id="made",
            step=step,
            previous=manifest.manifest_digest(folder, step - 1),
            version_in=f"{into.step}-{into.digest}",
            version_out=f"{out.step}-{out.digest}",
            checkpoint=folder.checkpoint(step + 1),
            cursor=asdict(cursor),
            commits=manifest.commit_entries(list(commits.values())),
            accounting=counts,
            metrics={},
            attempt=1,
            parameters_digest=runs.parameters_digest(made.parameters),
        ),
    )


def make_run(root: str, steps: int, **sizes: int) -> MadeRun:
    made = begin_run(root, **sizes)
    for step in range(steps):
        add_step(made, step)
    return made
