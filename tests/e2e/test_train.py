"""The whole DAG on real engines: Megatron trains, transformers generates over HTTP behind the router."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from milepost.engines.digest import weights_digest
from milepost.engines.protocols import WeightVersion
from milepost.flows.convert import convert_model
from milepost.flows.evaluate import evaluate
from milepost.flows.recipe import load_recipe
from milepost.flows.replay import replay
from milepost.flows.sql import as_rows, query
from milepost.flows.train import train
from milepost.flows.what_if import what_if
from milepost.storage import files, manifest, runs
from milepost.storage.parameters import EvalSet, Parameters
from milepost.storage.runs import RunFolder
from milepost.storage.tables import TableRef, read_table
from milepost.storage.verify import verify

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect_server", "ray_cluster")]

BASE = [
    "data.apply_chat_template=false",
    "data.rollout_batch_size=4",
    "data.n_samples_per_prompt=4",
    "algorithm.num_steps_per_rollout=2",
    "model.context_length=32",
    "rollout.max_new_tokens=6",
    "rollout.temperature=0.8",
    "rollout.shards=2",
    "reward.name=tests.rewards_for_tests:parity",
    "optimizer.lr=1e-3",
    "checkpoint.every_steps=1",
    "perf.train_threads=1",
    "engines.rollout_threads=1",
    "tracking.enabled=false",
]


def trained(run: str, root: Path, model: str, *overrides: str, steps: int = 2) -> RunFolder:
    prompts = root / "prompts.jsonl"
    rows = [{"prompt": f"{number}+1=", "label": str(number + 1)} for number in range(8)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    chosen, _ = load_recipe(None, [*BASE, f"model.path={model}", f"data.path={prompts}", *overrides])
    sections: dict[str, Any] = {name: getattr(chosen, name) for name in Parameters.model_fields}
    asyncio.run(train(run=run, root=str(root), steps=steps, **sections))
    return runs.run_folder(str(root), run)


def batches(folder: RunFolder, step: int) -> list[Any]:
    entry = next(item for item in manifest.load(folder, step).commits if item["slot"] == "optimize-r0")
    return [read_table(TableRef(**ref)) for _, ref in sorted(entry["tables"].items())]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, model_dir: str) -> RunFolder:
    return trained("real", tmp_path_factory.mktemp("real"), model_dir)


def test_the_trainer_recomputes_the_log_probabilities_that_the_engine_reported(run: RunFolder) -> None:
    for step in (0, 1):
        for batch in batches(run, step):
            rollout = np.concatenate([np.array(row) for row in batch["rollout_logprobs"].to_pylist()])
            trainer = np.concatenate([np.array(row) for row in batch["old_logprobs"].to_pylist()])
            assert len(rollout) and np.abs(rollout - trainer).max() < 1e-4


@pytest.mark.parametrize("steps", ["0:2", "1:2"])
def test_a_replay_is_identical_down_to_the_weights(run: RunFolder, steps: str) -> None:
    found = asyncio.run(replay(run=run.run_id, root=str(Path(run.uri).parent), steps=steps))
    assert found["verdict"] == "identical"
    assert {stage["stage"] for stage in found["stages"]} == {"score", "filter", "optimize", "weights"}


def test_another_estimator_is_answered_from_the_stored_samples(run: RunFolder) -> None:
    root = str(Path(run.uri).parent)
    found = asyncio.run(what_if(run=run.run_id, overrides=("algorithm.advantage=rloo",), root=root, steps="0:1"))
    rows = {row["metric"]: (row["stored"], row["now"]) for row in found["rows"]}
    assert rows["reward"][0] == rows["reward"][1]
    assert rows["grad_norm"][0] != rows["grad_norm"][1]


def test_every_sample_carries_the_version_of_the_weights_that_made_it(run: RunFolder) -> None:
    asked = "select distinct step, weight_version_min, weight_version_max, weights_digest from rollouts order by 1"
    _, rows = as_rows(query([run], asked))
    for step, low, high, digest in rows:
        version_in = WeightVersion.parse(manifest.load(run, step).version_in)
        assert (low, high) == (step, step) and version_in.digest.startswith(digest)


def test_training_changes_the_weights_and_the_export_has_the_digest_it_claims(run: RunFolder) -> None:
    versions = [manifest.load(run, step).version_out for step in (0, 1)]
    assert len({version.split("-")[1] for version in versions}) == 2
    model = AutoModelForCausalLM.from_pretrained(run.weights(2))
    tied = model.config.tie_word_embeddings
    named = [(name, tensor) for name, tensor in model.state_dict().items() if not (tied and name == "lm_head.weight")]
    assert weights_digest(named) == WeightVersion.parse(versions[1]).digest


def test_a_checkpoint_is_saved_where_the_manifest_says(run: RunFolder) -> None:
    for step in (0, 1):
        assert manifest.load(run, step).checkpoint == run.checkpoint(step + 1)
        assert files.names(run.checkpoint(step + 1))


def test_the_first_optimizer_step_is_on_policy(run: RunFolder) -> None:
    """The run has checked it itself; trainer and engine agree at their temperature to the rounding of float32."""
    for step in (0, 1):
        metrics = manifest.load(run, step).metrics
        assert metrics["train/pg_clipfrac"] < 0.5 and metrics["train/optimizer_steps"] == 2
        assert metrics["mismatch/logprob_abs_diff"] < 1e-5 and metrics["mismatch/ess"] == pytest.approx(1, abs=1e-6)


def test_the_same_run_again_has_the_same_weights(run: RunFolder, tmp_path: Path, model_dir: str) -> None:
    """Also where trainer and engine take turns on a GPU, of which there is none here."""
    again = trained("again", tmp_path, model_dir, "perf.colocate=true")
    assert manifest.load(again, 1).version_out == manifest.load(run, 1).version_out


@pytest.mark.parametrize(
    "layout",
    [
        "tensor_parallel",
        *(pytest.param(f"{split}_parallel", marks=pytest.mark.long) for split in ("pipeline", "data", "context")),
    ],
)
def test_two_ranks_train_the_same_run(run: RunFolder, tmp_path: Path, model_dir: str, layout: str) -> None:
    split = trained("split", tmp_path, model_dir, f"model.{layout}=2", steps=1)
    found, expected = manifest.load(split, 0), manifest.load(run, 0)
    assert found.version_in == expected.version_in
    assert found.metrics["rollout/reward"] == expected.metrics["rollout/reward"]
    assert found.metrics["train/grad_norm"] == pytest.approx(expected.metrics["train/grad_norm"], rel=1e-3)


def test_a_critic_learns_beside_the_policy_and_is_replayed_with_it(tmp_path: Path, model_dir: str) -> None:
    told = ["algorithm.advantage=gae", "algorithm.kl_reward_coef=0.05", "critic.lr=3e-3", "critic.pretrain_steps=2"]
    ppo = trained("ppo", tmp_path, model_dir, *told, steps=4)
    closed = [manifest.load(ppo, step) for step in range(4)]
    losses = [each.metrics["train/value_loss"] for each in closed]
    assert losses[3] < losses[0] / 1.2 and all(each.metrics["train/critic-optimizer_steps"] == 2 for each in closed)
    digests = [each.version_out.split("-")[1] for each in closed]
    assert digests[0] == digests[1] and len(set(digests)) == 3
    assert verify(ppo).faults == []
    assert asyncio.run(replay(run="ppo", root=str(tmp_path), steps="3:4"))["verdict"] == "identical"


def test_a_checkpoint_is_converted_for_its_evaluation_and_has_the_weights_it_names(run: RunFolder) -> None:
    """The older one, whose exported folder is not the newest: its trainer reads it and writes a folder, once."""
    held_out = [EvalSet(path=str(Path(run.uri).parent / "prompts.jsonl"), n_samples_per_prompt=2)]
    root = str(Path(run.uri).parent)
    found = asyncio.run(evaluate(checkpoint="real@1", run="scored", root=root, evals=held_out, compare="real@0"))
    assert found["weights"] == manifest.load(run, 0).version_out
    assert [pair["items"] for pair in found["compared"]["sets"]] == [8]
    (export,) = Path(run.uri, "exports").iterdir()
    again = convert_model("real@1", f"{root}/again", root, form="hf", dtype="", like="")
    assert found["weights"] == f"1-{again['weights']}"
    assert (export / "config.json").is_file() and verify(runs.run_folder(root, "scored")).faults == []
