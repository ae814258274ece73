"""The whole DAG under Prefect, on fake engines: order, overlap, accounting, and what a run leaves behind."""

import asyncio
import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from milepost.engines.fleet import Fleet, fleet
from milepost.flows.failure import sentence
from milepost.flows.iteration import iteration
from milepost.flows.loop import recover
from milepost.flows.recipe import load_recipe
from milepost.flows.report import write_report
from milepost.flows.sql import as_rows, query
from milepost.flows.start import Launched, begin_run
from milepost.flows.train import train
from milepost.storage import files, manifest, runs
from milepost.storage.accounting import epoch_accounting
from milepost.storage.journal import StepStore
from milepost.storage.parameters import Parameters
from milepost.storage.runs import RunFolder
from milepost.storage.tables import TableRef, read_table
from milepost.storage.verify import verify

from .conftest import Prompts
from .sums import write_sums

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect_server", "ray_cluster")]

FAKE = [
    'engines.train="fake"',
    'engines.rollout="fake"',
    "data.apply_chat_template=false",
    "data.rollout_batch_size=8",
    "data.n_samples_per_prompt=2",
    "algorithm.num_steps_per_rollout=2",
    "model.context_length=32",
    "rollout.max_new_tokens=4",
    "rollout.shards=4",
    "reward.name=tests.rewards_for_tests:parity",
    "tracking.enabled=false",
]


def parameters(model_dir: str, prompts: str, *overrides: str) -> Parameters:
    found, _ = load_recipe(None, [*FAKE, f"model.path={model_dir}", f"data.path={prompts}", *overrides])
    return found


def sections(chosen: Parameters) -> dict[str, Any]:
    return {name: getattr(chosen, name) for name in Parameters.model_fields}


def trained(run: str, root: Path, chosen: Parameters, *, steps: int) -> runs.RunFolder:
    asyncio.run(train(run=run, root=str(root), steps=steps, **sections(chosen)))
    return runs.run_folder(str(root), run)


@pytest.fixture(scope="module")
def run(
    tmp_path_factory: pytest.TempPathFactory, model_dir: str, prefect_server: str, ray_cluster: None
) -> tuple[RunFolder, Parameters]:
    """Three steps of eight prompts, of twelve, evaluated every two; and its parameters."""
    base = tmp_path_factory.mktemp("fake")
    path, held_out = write_sums(base / "prompts.jsonl", range(12)), write_sums(base / "held-out.jsonl", range(4))
    chosen = parameters(model_dir, path, f"eval.path={held_out}", "eval.every_steps=2")
    return trained("three", base / "runs", chosen, steps=3), chosen


@pytest.fixture
def folder(run: tuple[RunFolder, Parameters]) -> RunFolder:
    return run[0]


def test_a_run_leaves_a_chain_of_manifests_and_readable_tables(folder: RunFolder) -> None:
    steps = [manifest.load(folder, step) for step in manifest.finished_steps(folder)]
    assert [step.step for step in steps] == [0, 1, 2]
    assert [step.previous for step in steps[1:]] == [manifest.manifest_digest(folder, step) for step in (0, 1)]
    assert [step.version_in for step in steps[1:]] == [step.version_out for step in steps[:-1]]
    for step in steps:
        assert step.accounting["served"] == 8 == sum(n for name, n in step.accounting.items() if name != "served")
        for entry in step.commits:
            for ref in entry["tables"].values():
                assert read_table(TableRef(**ref)).num_rows == ref["rows"]


def test_every_sample_is_trained_once_and_in_equal_batches(folder: RunFolder) -> None:
    tables = {
        entry["slot"]: {name: read_table(TableRef(**ref)) for name, ref in entry["tables"].items()}
        for entry in manifest.load(folder, 0).commits
    }
    batches = list(tables["optimize-r0"].values())
    kept = [
        sample
        for slot, found in sorted(tables.items())
        if slot.startswith("filter")
        for sample, keep in zip(
            found["rollouts"]["sample_id"].to_pylist(), found["rollouts"]["kept"].to_pylist(), strict=True
        )
        if keep
    ]
    assert [batch.num_rows for batch in batches] == [8, 8]
    assert [sample for batch in batches for sample in batch["sample_id"].to_pylist()] == kept


def test_prompts_are_served_in_turn_over_the_steps_and_wrap(folder: RunFolder) -> None:
    served: list[int] = []
    for step in range(3):
        entry = next(item for item in manifest.load(folder, step).commits if item["slot"] == "sample-r0")
        served += read_table(TableRef(**entry["tables"]["prompts"]))["row"].to_pylist()
    assert sorted(served[:12]) == list(range(12))
    assert sorted(served[12:]) == list(range(12))


def test_held_out_prompts_are_evaluated_before_the_first_step_and_after_the_last(folder: RunFolder) -> None:
    assert files.names(files.join(folder.uri, "evals")) == ["000000", "000002", "000003"]


def test_the_report_shows_every_step(folder: RunFolder) -> None:
    page = files.read(write_report(folder)).decode()
    assert "3 of 3 steps" in page and "<svg" in page and "<script" not in page


def test_a_finished_run_is_left_as_it_is(run: tuple[RunFolder, Parameters]) -> None:
    folder, chosen = run
    before = [manifest.manifest_digest(folder, step) for step in range(3)]
    assert trained("three", Path(folder.uri).parent, chosen, steps=3) == folder
    assert [manifest.manifest_digest(folder, step) for step in range(3)] == before
    assert manifest.finished_steps(folder) == [0, 1, 2]


def test_several_sets_have_their_quotas_rewards_and_epochs(tmp_path: Path, model_dir: str, prompts: Prompts) -> None:
    """Six sums and two words a step: the second step begins the sums again."""
    sets = [{"path": prompts(9), "name": "sums", "weight": 3}, {"path": prompts(5, name="b.jsonl"), "reward": "exact"}]
    chosen = parameters(model_dir, "", f"data.sets={json.dumps(sets)}")
    folder = trained("mixed", tmp_path, chosen, steps=2)
    asked = "select step, dataset, count(distinct group_id), any_value(verdict->>'grader') from rollouts group by all"
    found = as_rows(query([folder], f"{asked} order by all"))[1]
    assert [row[:3] for row in found] == [
        (step, name, size) for step in (0, 1) for name, size in (("b", 2), ("sums", 6))
    ]
    assert [row[3].partition("@")[0] for row in found[:2]] == ["exact", "tests.rewards_for_tests:parity"]
    assert [(epoch, own["prompts"]) for epoch, own in epoch_accounting(folder).items()] == [
        (("b", 0), 5),
        (("sums", 0), 9),
        (("sums", 1), 9),
    ]
    assert verify(folder).faults == []


def test_a_slow_shard_delays_no_other(tmp_path: Path, model_dir: str, prompts: Prompts) -> None:
    """One prompt generates slowly: the other shards are scored and filtered before its shard is generated."""
    chosen = parameters(model_dir, prompts(8), "data.shuffle=false")
    folder = runs.run_folder(str(tmp_path), "overlap")
    launched = begin_run(str(tmp_path), folder, 1, chosen, fence=0)
    slow = read_table(TableRef(**launched.record.data["prompts"]))["prompt_token_ids"][5].as_py()[0]
    engine_options = {"slow_token": slow, "slow_seconds": 5.0}
    with fleet("overlap", chosen, model_dir, engine_options=engine_options) as engines:
        asyncio.run(_one_step(launched, engines, str(tmp_path)))
    done = {commit.slot: commit.committed_at for commit in StepStore(folder.step(0), "overlap", 0).commits()}
    slow_shard, others = 5 % 4, [shard for shard in range(4) if shard != 5 % 4]
    assert all(done[f"filter-r0-s{shard:03d}"] < done[f"generate-r0-s{slow_shard:03d}"] for shard in others)


async def _one_step(launched: Launched, engines: Fleet, root: str) -> None:
    step, position = await recover(launched, engines)
    await iteration(root, "overlap", step, position)


def test_filtering_that_starves_takes_its_rounds_and_then_its_policy(
    tmp_path: Path, model_dir: str, prompts: Prompts
) -> None:
    starving = ["reward.name=tests.rewards_for_tests:always_one", 'filter.group="nonzero_std"', "filter.max_rounds=3"]
    chosen = parameters(model_dir, prompts(), *starving, 'filter.on_too_few="skip_step"')
    folder = trained("starved", tmp_path, chosen, steps=2)
    for closed in (manifest.load(folder, step) for step in (0, 1)):
        assert closed.accounting == {"filtered: zero_std": 24, "served": 24}
        assert closed.version_in.split("-")[1] == closed.version_out.split("-")[1]
    assert verify(folder).faults == []
    failing = parameters(model_dir, prompts(), *starving, 'filter.on_too_few="fail"')
    with pytest.raises(RuntimeError, match="kept 0 of 8 groups after 3 rounds"):
        trained("failed", tmp_path, failing, steps=1)


def test_a_full_disk_stops_the_run_in_one_sentence_and_leaves_nothing_half_written(
    tmp_path: Path, model_dir: str, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = parameters(model_dir, prompts())
    room = iter(range(130))  # a step publishes about forty files, each with its folder
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if next(room, None) is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", fsync)
        with pytest.raises((OSError, BaseExceptionGroup)) as caught:
            trained("full", tmp_path, chosen, steps=3)
    assert sentence(caught.value) == "no space left on device"
    folder = runs.run_folder(str(tmp_path), "full")
    assert not list(Path(folder.uri).rglob("*.tmp"))
    steps = manifest.finished_steps(folder)
    assert steps and steps == list(range(len(steps))) and len(steps) < 3
    for commit in StepStore(folder.step(len(steps)), "full", 0).commits():
        assert all(read_table(ref).num_rows == ref.rows for ref in commit.tables.values())


def test_a_part_of_a_reward_that_hangs_or_raises_costs_only_its_samples(
    tmp_path: Path, model_dir: str, prompts: Prompts
) -> None:
    """Of 40 samples 5 % hang and 5 % raise."""
    one, other = "tests.rewards_for_tests:hang_or_raise", "tests.rewards_for_tests:parity"
    parts = json.dumps([{"name": one}, {"name": other, "weight": 0.5}])
    bad = [f"reward.parts={parts}", "reward.timeout_seconds=0.5", "reward.workers=2"]
    size = ["data.rollout_batch_size=20", "data.shuffle=false"]
    folder = trained("graders", tmp_path, parameters(model_dir, prompts(20), *bad, *size), steps=1)
    asked = "select verdict->>'reason' as reason, count(*) from rollouts where reward is null group by 1 order by 1"
    columns, rows = as_rows(query([folder], asked))
    assert columns[0] == "reason"
    assert [(reason.split(":")[0], count) for reason, count in rows] == [("error", 2), ("timeout", 2)]
    closed = manifest.load(folder, 0)
    assert (closed.metrics["rollout/unscorable"], closed.accounting["served"]) == (4, 20)
    assert [closed.metrics[f"rollout/error_cat/{kind}"] for kind in ("error", "timeout")] == [2, 2]
    sums = f"select reward, rewards['{one}'], rewards['{other}'], response from rollouts where kept"
    for reward, whole, half, response in as_rows(query([folder], sums))[1]:
        assert (whole, half, reward) == (1.0, len(response) % 2, 1.0 + 0.5 * half)
