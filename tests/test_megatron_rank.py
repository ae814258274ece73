"""One Megatron rank: a step is applied once, does not depend on how the batch is cut, and can be gone back to."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from megatron.core import dist_checkpointing
from safetensors.torch import load_file
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, Qwen3Config

from milepost.engines import megatron_world
from milepost.engines.megatron_batch import loss_columns, micro_batch, trained_samples
from milepost.engines.megatron_checkpoint import DamagedCheckpoint
from milepost.engines.megatron_model import compile_layers
from milepost.engines.megatron_rank import MegatronRank
from milepost.engines.megatron_step import denominators
from milepost.engines.protocols import UpdateParams
from milepost.engines.train_actors import TrainSetup
from milepost.storage import checkpoints
from milepost.storage.checkpoints import CheckpointRef
from milepost.storage.micro_batches import MicroBatches, micro_batches, packing_rules, trained_lengths
from milepost.storage.parameters import ModelSection
from milepost.storage.runs import RunFolder
from milepost.storage.schema import ROLLOUTS, from_rows
from milepost.storage.tables import TableRef, read_table, with_columns, write_table
from milepost.storage.training import OptimizerSection, PerfSection

pytestmark = pytest.mark.slow

VOCAB = 64
UPDATE = UpdateParams("ppo_clip", {"clip_low": 0.2})


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> TrainSetup:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(1)
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}
    model = AutoModelForCausalLM.from_config(Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2))
    model.save_pretrained(folder)
    optimizer = OptimizerSection(lr=1e-2, warmup_steps=2)
    return TrainSetup(str(folder), ModelSection(), optimizer, PerfSection(train_threads=1), 0.8, 0)


class Ranks:
    """Starts one rank at a time in this process."""

    def __init__(self, setup: TrainSetup) -> None:
        self.setup = setup
        self._running: MegatronRank | None = None

    def start(self, **changes: Any) -> MegatronRank:
        self.stop()
        self._running = MegatronRank(0, 1, replace(self.setup, **changes))
        self._running.connect(*self._running.rendezvous())
        return self._running

    def stop(self) -> None:
        if self._running is not None:
            self._running.close()
            self._running = None


@pytest.fixture
def ranks(setup: TrainSetup) -> Iterator[Ranks]:
    running = Ranks(setup)
    yield running
    running.stop()


def rollouts() -> pa.Table:
    random = np.random.default_rng(0)
    rows: list[dict[str, object]] = []
    for index in range(8):
        prompt, response = int(random.integers(2, 9)), int(random.integers(1, 17))
        row: dict[str, object] = {name: "" for name in ROLLOUTS.names if ROLLOUTS.field(name).type == pa.string()}
        row |= {"step": 0, "shard": 0, "turns": 1, "seed": 0, "response_escaped": False, "kept": True}
        row |= {"sample_id": f"s{index}", "advantages": [float(random.normal())] * response}
        row |= {"prompt_token_ids": random.integers(0, VOCAB, prompt).tolist(), "loss_mask": [1] * response}
        row |= {"response_token_ids": random.integers(0, VOCAB, response).tolist()}
        logprobs = (-4 - random.random(response)).tolist()
        rows.append(row | {"rollout_logprobs": logprobs, "old_logprobs": logprobs})
    return from_rows(rows, ROLLOUTS)


def write(folder: Path, **columns: list[Any]) -> TableRef:
    return write_table(str(folder / "batch"), with_columns(rollouts(), columns), ROLLOUTS)


def saved(rank: MegatronRank, folder: RunFolder, number: int) -> CheckpointRef:
    """A published checkpoint of the rank, which has taken `number` optimizer steps."""
    ref = rank.save(folder.checkpoint(number))
    checkpoints.publish(folder, ref)
    return ref


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(str(tmp_path / "run"), "run")


def digest(rank: MegatronRank, folder: Path) -> str:
    return rank.weights(str(folder / "weights"), 0).version.digest


def test_the_same_steps_give_the_same_bits(ranks: Ranks, tmp_path: Path) -> None:
    found = []
    for _ in range(2):
        rank = ranks.start()
        results = [rank.step(write(tmp_path), UPDATE, key) for key in ("a", "b")]
        found.append((digest(rank, tmp_path), [result.metrics["loss"] for result in results]))
    assert found[0] == found[1]


def test_the_learning_rate_warms_up_by_applied_steps(ranks: Ranks, tmp_path: Path) -> None:
    rank = ranks.start()
    assert [rank.step(write(tmp_path), UPDATE, key).metrics["lr"] for key in "abcd"] == [0, 0.005, 0.01, 0.01]


def test_the_result_does_not_depend_on_the_micro_batches(ranks: Ranks, tmp_path: Path) -> None:
    found = []
    for budget in (1, 60, 10_000):
        rank = ranks.start(perf=PerfSection(train_threads=1, max_tokens_per_micro_batch=budget))
        result = [rank.step(write(tmp_path), UPDATE, key) for key in ("a", "b")][-1]
        found.append((result.metrics["loss"], result.metrics["grad_norm"]))
    assert found[0] == pytest.approx(found[2], rel=1e-5) and found[1] == pytest.approx(found[2], rel=1e-5)


@pytest.mark.parametrize("changes", [{"packing": False}, {"recompute": "selective"}, {"recompute": "full"}])
def test_padding_and_recomputation_change_no_number(changes: dict[str, Any], ranks: Ranks, tmp_path: Path) -> None:
    found = []
    for perf in (PerfSection(train_threads=1), PerfSection(train_threads=1, **changes)):
        rank = ranks.start(perf=perf)
        filled = rank.logprobs(write(tmp_path), "policy", str(tmp_path / "filled"))
        assert filled is not None
        metrics = [rank.step(write(tmp_path), UPDATE, key).metrics for key in ("a", "b")]
        logprobs = np.concatenate(read_table(filled)["old_logprobs"].to_pylist())
        found.append([*logprobs, *(step[name] for step in metrics for name in ("loss", "grad_norm"))])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_what_is_compiled_is_whole_graphs_and_changes_no_number(recompute: str, ranks: Ranks, tmp_path: Path) -> None:
    wanted = ranks.start().step(write(tmp_path), UPDATE, "a").metrics
    rank = ranks.start(perf=PerfSection(train_threads=1, recompute=recompute))
    compile_layers(rank._policy.model.gpt, backend="eager")
    counters.clear()
    found = rank.step(write(tmp_path), UPDATE, "a").metrics
    assert counters["stats"]["unique_graphs"] and not counters["graph_break"]
    assert [found[name] for name in ("loss", "grad_norm")] == pytest.approx(
        [wanted[name] for name in ("loss", "grad_norm")], rel=1e-6
    )


def test_rows_without_a_trained_token_change_nothing(ranks: Ranks, tmp_path: Path) -> None:
    rank = ranks.start()
    wanted = rank.step(write(tmp_path), UPDATE, "a").metrics
    more = pa.concat_tables([rollouts(), rollouts().slice(0, 3)])
    empty, masked = more["response_token_ids"].to_pylist(), more["loss_mask"].to_pylist()
    columns = {name: more[name].to_pylist() for name in ("rollout_logprobs", "advantages", "old_logprobs")}
    for values in (empty, masked, *columns.values()):
        values[8] = []
    masked[9] = [0] * len(masked[9])
    kept = [True] * 10 + [False]
    table = with_columns(more, {"response_token_ids": empty, "loss_mask": masked, "kept": kept, **columns})
    found = ranks.start().step(write_table(str(tmp_path / "more"), table, ROLLOUTS), UPDATE, "a").metrics
    assert [found[name] for name in ("loss", "grad_norm", "samples")] == [
        pytest.approx(wanted[name], rel=1e-6) for name in ("loss", "grad_norm", "samples")
    ]


def test_a_batch_without_a_token_to_train_is_left_out(ranks: Ranks, tmp_path: Path) -> None:
    rank = ranks.start()
    before, masks = digest(rank, tmp_path), rollouts()["loss_mask"].to_pylist()
    result = rank.step(write(tmp_path, loss_mask=[[0] * len(mask) for mask in masks]), UPDATE, "a")
    assert (result.applied, result.optimizer_step, result.is_empty) == (False, 0, True)
    assert digest(rank, tmp_path) == before
    assert rank.step(write(tmp_path), UPDATE, "b").optimizer_step == 1


def test_a_step_says_how_its_batch_was_cut(ranks: Ranks, tmp_path: Path) -> None:
    perf = PerfSection(train_threads=1, max_tokens_per_micro_batch=40, balance="flops")
    result = ranks.start(perf=perf).step(write(tmp_path), UPDATE, "a")
    cut, lengths = MicroBatches.parse(result.micro_batches), trained_lengths(rollouts())
    assert cut == micro_batches(lengths, packing_rules(ModelSection(), perf), cut.cost) and cut.cost[1] > 0
    assert cut.metrics(lengths).items() <= result.metrics.items() and len(cut.rows[0]) > 1


def test_a_key_is_applied_once(ranks: Ranks, tmp_path: Path) -> None:
    rank = ranks.start()
    first, before = rank.step(write(tmp_path), UPDATE, "a"), digest(rank, tmp_path)
    assert rank.step(write(tmp_path), UPDATE, "a") == first
    assert digest(rank, tmp_path) == before


def test_a_loss_that_is_not_finite_leaves_the_weights_alone(ranks: Ranks, tmp_path: Path) -> None:
    rank = ranks.start()
    advantages = rollouts()["advantages"].to_pylist()
    advantages[0] = [float("inf")] * len(advantages[0])
    before = digest(rank, tmp_path)
    result = rank.step(write(tmp_path, advantages=advantages), UPDATE, "a")
    assert (result.applied, result.optimizer_step) == (False, 0)
    assert digest(rank, tmp_path) == before
    assert rank.step(write(tmp_path), UPDATE, "b").applied


def test_entropy_is_measured_when_asked_for_and_changes_no_gradient(ranks: Ranks, tmp_path: Path) -> None:
    """The weights are random, so that the distributions are close to uniform."""
    shown = [ranks.start().step(write(tmp_path), UpdateParams("ppo_clip", {"log_entropy": on}), "a") for on in (0, 1)]
    assert "entropy" not in shown[0].metrics
    assert shown[1].metrics["entropy"] == pytest.approx(np.log(VOCAB), rel=0.02)
    assert [shown[0].metrics[name] for name in ("loss", "grad_norm")] == [
        shown[1].metrics[name] for name in ("loss", "grad_norm")
    ]


def test_a_loss_that_is_not_built_in_is_called_with_its_options(ranks: Ranks, tmp_path: Path) -> None:
    params = {"aggregation": "token_mean", "factor": 3.0}
    metrics = ranks.start().step(write(tmp_path), UpdateParams("tests.losses_for_tests:squared", params), "a").metrics
    assert metrics["loss"] == pytest.approx(3 * metrics["squared"])


def test_importance_weights_are_of_all_samples_or_of_none(ranks: Ranks, tmp_path: Path) -> None:
    weights: list[Any] = [[0.0] * len(row) for row in rollouts()["loss_mask"].to_pylist()]
    rank = ranks.start()
    rejected = rank.step(write(tmp_path, importance_weights=weights), UPDATE, "a")
    assert (rejected.metrics["loss"], rejected.metrics["grad_norm"]) == (0.0, 0.0)
    with pytest.raises(ValueError, match="7 of 8 samples have importance_weights: fill all of them or none"):
        rank.step(write(tmp_path, importance_weights=[None, *weights[1:]]), UPDATE, "b")


def test_a_restored_rank_continues_bit_for_bit(ranks: Ranks, tmp_path: Path, run: RunFolder) -> None:
    rank = ranks.start()
    start = saved(rank, run, 0)
    rank.step(write(tmp_path), UPDATE, "a")
    checkpoint = saved(rank, run, 1)
    assert checkpoints.latest(run) == checkpoint
    wanted = [rank.step(write(tmp_path), UPDATE, key).metrics["loss"] for key in ("b", "c")]
    end = digest(rank, tmp_path)
    for restored in (rank, ranks.start()):
        if restored is not rank:
            restored.restore(checkpoint)
            assert (checkpoint.last_key, restored.step(write(tmp_path), UPDATE, "a").optimizer_step) == ("a", 1)
            assert [restored.step(write(tmp_path), UPDATE, key).metrics["loss"] for key in ("b", "c")] == wanted
            assert digest(restored, tmp_path) == end
            restored.restore(start)
            assert digest(restored, tmp_path) == start.version.digest


def test_memory_that_was_given_up_comes_back_bit_for_bit(ranks: Ranks, tmp_path: Path) -> None:
    rank = ranks.start(perf=PerfSection(train_threads=1, dtype="bfloat16"))
    rank.step(write(tmp_path), UPDATE, "a")
    wanted, memory = digest(rank, tmp_path), list(rank._policy.model.kept())
    before = [tensor.clone() for tensor in memory]
    for _ in range(2):
        rank._parked.release(memory, rank._policy.model.scratch())
        assert {tensor.untyped_storage().nbytes() for tensor in memory} == {0}
        rank.resume_memory()
    assert all(torch.equal(tensor, kept) for tensor, kept in zip(memory, before, strict=True))
    assert digest(rank, tmp_path) == wanted
    assert {tensor.dtype for tensor in memory if tensor.numel() > 1} == {torch.bfloat16, torch.float32}


def test_a_rank_that_gave_its_memory_up_still_answers(ranks: Ranks, tmp_path: Path) -> None:
    rank = ranks.start()
    wanted = [rank.step(write(tmp_path), UPDATE, key).metrics["loss"] for key in ("a", "b")]
    rank, found = ranks.start(), []
    for key in ("a", "b"):
        rank._park()
        found.append(rank.step(write(tmp_path), UPDATE, key).metrics["loss"])
    assert found == wanted


def test_a_damaged_or_unpublished_checkpoint_is_refused(ranks: Ranks, run: RunFolder) -> None:
    rank = ranks.start()
    checkpoint = saved(rank, run, 0)
    file = Path(checkpoint.uri, "__0_0.distcp")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(DamagedCheckpoint, match="__0_0.distcp has changed since it was saved"):
        rank.restore(checkpoint)
    with pytest.raises(DamagedCheckpoint, match="has no checkpoint.json"):
        rank.restore(rank.save(run.checkpoint(0)))


@pytest.mark.parametrize(
    ("part", "name"), [("optimizer", "optimizer"), ("streams", "streams/shard_0_1"), ("model", "decoder")]
)
def test_a_checkpoint_without_a_part_of_the_state_is_refused(
    part: str, name: str, ranks: Ranks, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = ranks.start()
    with monkeypatch.context() as patch:
        whole = dist_checkpointing.save
        patch.setattr(
            dist_checkpointing, "save", lambda state, folder: whole({**state, part: {"kept": "nothing"}}, folder)
        )
        checkpoint = saved(rank, run, 0)
    before = digest(rank, Path(run.uri))
    with pytest.raises(DamagedCheckpoint, match=f"lacks a part of the trainer's state \\(.*{name}"):
        rank.restore(checkpoint)
    assert digest(rank, Path(run.uri)) == before


def reference(rank: MegatronRank, folder: Path) -> list[list[float]]:
    found = rank.logprobs(write(folder), "reference", str(folder / "filled"))
    assert found is not None
    return read_table(found)["ref_logprobs"].to_pylist()


def test_a_reference_of_its_own_answers_from_the_start_and_must_be_the_same_later(
    ranks: Ranks, run: RunFolder, tmp_path: Path
) -> None:
    rank = ranks.start()
    for key in ("a", "b"):
        rank.step(write(tmp_path), UPDATE, key)
    other = rank.weights(str(tmp_path / "other"), 2)
    trained = read_table(rank.logprobs(write(tmp_path), "policy", str(tmp_path / "filled")))["old_logprobs"].to_pylist()
    rank = ranks.start(reference_dir=other.uri)
    before = rank.digest()
    assert reference(rank, tmp_path) == reference(rank, tmp_path) == trained
    assert rank.digest() == before != other.version.digest
    checkpoint = saved(rank, run, 0)
    rank = ranks.start(reference_dir=other.uri)
    rank.restore(checkpoint)
    with pytest.raises(ValueError, match="has the reference weights .*: give model.path the model"):
        ranks.start().restore(checkpoint)


def test_a_renewed_reference_is_kept_with_the_checkpoint_and_is_the_same_after_it(
    ranks: Ranks, run: RunFolder, tmp_path: Path
) -> None:
    rank = ranks.start()
    for key in ("a", "b"):
        rank.step(write(tmp_path), UPDATE, key)
    rank.renew_reference("2-x")
    renewed = reference(rank, tmp_path)
    rank.step(write(tmp_path), UPDATE, "c")
    rank.renew_reference("2-x")  # once more, by a stage that is repeated
    version = rank.digest()
    checkpoint = saved(rank, run, 3)
    assert reference(rank, tmp_path) == renewed and rank.digest() == version
    rank = ranks.start()
    began = reference(rank, tmp_path)
    rank.restore(checkpoint)
    assert reference(rank, tmp_path) == renewed != began
    assert rank.digest() == version
    rank.renew_reference("3-x")
    assert reference(rank, tmp_path) != renewed


@pytest.mark.parametrize("lost", ["optimizer_steps", "last", "optimizer_format"])
def test_a_checkpoint_that_does_not_say_where_it_is_is_refused(lost: str, ranks: Ranks, run: RunFolder) -> None:
    rank = ranks.start()
    ref = rank.save(run.checkpoint(0))
    index = Path(ref.uri, "milepost.json")
    index.write_text(json.dumps({name: value for name, value in json.loads(index.read_text()).items() if name != lost}))
    checkpoints.publish(run, ref)
    with pytest.raises(DamagedCheckpoint, match=f"milepost.json has no {lost}"):
        rank.restore(ref)


def test_a_checkpoint_of_another_start_is_refused(ranks: Ranks, run: RunFolder, tmp_path: Path) -> None:
    rank = ranks.start()
    rank.step(write(tmp_path), UPDATE, "a")
    rank.step(write(tmp_path), UPDATE, "b")
    checkpoint, moved = saved(rank, run, 2), rank.weights(str(tmp_path / "moved"), 2)
    with pytest.raises(ValueError, match="has the reference weights .*: give model.path the model it was trained with"):
        ranks.start(model_dir=moved.uri).restore(checkpoint)


def test_the_reference_is_the_model_as_loaded_and_asking_for_it_changes_nothing(ranks: Ranks, tmp_path: Path) -> None:
    rank = ranks.start()
    at_start = rank.logprobs(write(tmp_path), "policy", str(tmp_path / "filled"))
    for key in ("a", "b"):
        rank.step(write(tmp_path), UPDATE, key)
    before = digest(rank, tmp_path)
    later = rank.logprobs(write(tmp_path), "reference", str(tmp_path / "filled"))
    assert at_start is not None and later is not None
    assert read_table(later)["ref_logprobs"].to_pylist() == read_table(at_start)["old_logprobs"].to_pylist()
    assert digest(rank, tmp_path) == before


def test_bfloat16_trains_with_float32_master_weights(ranks: Ranks, tmp_path: Path, run: RunFolder) -> None:
    rank = ranks.start(perf=PerfSection(train_threads=1, dtype="bfloat16"))
    assert all(rank.step(write(tmp_path), UPDATE, key).applied for key in ("a", "b"))
    checkpoint, source = saved(rank, run, 2), rank.weights(str(tmp_path / "out"), 2)
    assert {tensor.dtype for tensor in load_file(Path(source.uri) / "model.safetensors").values()} == {torch.bfloat16}
    wanted = rank.step(write(tmp_path), UPDATE, "c").metrics["loss"]
    rank.restore(checkpoint)
    assert rank.step(write(tmp_path), UPDATE, "c").metrics["loss"] == wanted


def gradients(rank: MegatronRank, table: pa.Table) -> list[torch.Tensor]:
    """What the gradient buffer holds after all samples, each a micro-batch, and after each of them alone."""
    samples = trained_samples(table, VOCAB)
    cut = [micro_batch([sample], loss_columns(samples), torch.device("cpu"), packing=True) for sample in samples]
    (buffer,), found = rank._policy.model.scratch(), []
    with rank._working():
        for batches in (cut, *([batch] for batch in cut)):
            rank._policy.model.zero_gradients()
            rank._policy.gradients(batches, UpdateParams("ppo_clip"), denominators(samples))
            found.append(buffer.clone())
    return found


def test_gradients_of_bfloat16_add_up_in_float32(ranks: Ranks) -> None:
    exact = gradients(ranks.start(), rollouts())[0]
    found, *each = gradients(ranks.start(perf=PerfSection(train_threads=1, dtype="bfloat16")), rollouts())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.stack(each).double().sum(0).float(), rtol=1e-5, atol=1e-7)
    narrow = sum((part.bfloat16() for part in each), torch.zeros_like(found).bfloat16()).float()
    assert (found - exact).norm() < 0.02 * exact.norm()
    assert (found - narrow).norm() > 1e-3 * exact.norm()  # a sum in bfloat16 would have lost this much


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("old_logprobs", None, "sample 's1' has no old_logprobs: fill the column before the step"),
        ("loss_mask", [1], "sample 's1' has 1 values of loss_mask for .* response tokens"),
        ("prompt_token_ids", [], "sample 's1' has an empty prompt"),
        ("response_token_ids", [VOCAB], "sample 's1' has token 64, the model has 64"),
    ],
)
def test_a_malformed_batch_is_refused_by_sample(
    column: str, value: Any, message: str, ranks: Ranks, tmp_path: Path
) -> None:
    values = rollouts()[column].to_pylist()
    values[1] = value if column != "response_token_ids" else value * len(values[1])
    with pytest.raises(ValueError, match=message):
        ranks.start().step(write(tmp_path, **{column: values}), UPDATE, "a")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this torch can use the GPU")
def test_a_rank_with_a_gpu_that_its_torch_cannot_use_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron_world.cluster, "given_gpus", lambda: [0])
    with pytest.raises(ValueError, match=r"torch .* is built without CUDA .*: install a CUDA build"):
        megatron_world.require_given_gpu()
