"""The Megatron train engine over several ranks gives what one rank gives, however the model and the batch are split."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3Config

from milepost.engines.loss_inputs import count
from milepost.engines.losses import policy_loss
from milepost.engines.megatron_rank import MegatronRank
from milepost.engines.megatron_weights import gather_weights
from milepost.engines.protocols import VALUE_LOSS, UpdateParams, UpdateResult, WeightSource
from milepost.engines.train_actors import CriticSetup, TrainActors, TrainSetup, connect_train_engine, start_train_engine
from milepost.engines.value_loss import value_loss
from milepost.storage import checkpoints
from milepost.storage.checkpoints import CheckpointRef
from milepost.storage.parameters import ModelSection
from milepost.storage.runs import RunFolder
from milepost.storage.schema import ROLLOUTS, from_rows
from milepost.storage.tables import TableRef, read_table, write_table
from milepost.storage.training import OptimizerSection, PerfSection

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]

RANK = "milepost.engines.megatron_rank:MegatronRank"
CHUNKED = "tests.chunked_for_tests:ChunkedRank"
VOCAB = 67  # odd, so that tensor parallelism has to pad it
UPDATE = UpdateParams("ppo_clip", {"clip_high": 0.28, "kl_coef": 0.1, "entropy_coef": 0.05})
TEACH = UpdateParams(VALUE_LOSS, {"value_clip": 0.5, "aggregation": "sample_mean"})
TEMPERATURE = 0.8


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> TrainSetup:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    # A large eps keeps Adam from blowing up rounding differences of gradients that are close to zero.
    optimizer = OptimizerSection(lr=1e-3, eps=1e-2, weight_decay=0.1)
    critic = CriticSetup(str(folder), OptimizerSection(lr=0.1, eps=1e-2))
    return TrainSetup(
        str(folder), ModelSection(), optimizer, PerfSection(train_threads=1), TEMPERATURE, 0, critic=critic
    )


def rollouts() -> pa.Table:
    random = np.random.default_rng(0)
    rows: list[dict[str, object]] = []
    for index in range(9):
        prompt, response = int(random.integers(2, 9)), int(random.integers(1, 17))
        row: dict[str, object] = {name: "" for name in ROLLOUTS.names if ROLLOUTS.field(name).type == pa.string()}
        row |= {"step": 0, "shard": 0, "turns": 1, "seed": 0, "response_escaped": False, "kept": True}
        row |= {"sample_id": str(index), "advantages": [float(random.normal())] * response}
        row |= {"prompt_token_ids": random.integers(0, VOCAB, prompt).tolist()}
        row |= {"loss_mask": [1, *random.integers(0, 2, response - 1).tolist()]}
        row |= {"response_token_ids": random.integers(0, VOCAB, response).tolist()}
        row |= {name: (-4 * random.random(response)).tolist() for name in ("rollout_logprobs", "ref_logprobs")}
        row |= {"importance_weights": (2 * random.random(response)).tolist()}
        row |= {name: random.normal(size=response).tolist() for name in ("values", "returns")}
        rows.append(row)
    return from_rows(rows, ROLLOUTS)


def tensors(source: WeightSource) -> dict[str, torch.Tensor]:
    return load_file(Path(source.uri) / "model.safetensors")


def train(engine: TrainActors | MegatronRank, folder: Path) -> tuple[WeightSource, TableRef, list[UpdateResult]]:
    """Weights at the start, the batch with log-probabilities, and two steps on it."""
    start = engine.weights(str(folder / "start"), 0)
    batch = write_table(str(folder / "batch"), rollouts(), ROLLOUTS)
    filled = engine.logprobs(batch, "policy", str(folder / "filled"))
    assert filled is not None
    return start, filled, [engine.step(filled, UPDATE, key) for key in ("first", "second")]


def expected(engine: TrainActors | MegatronRank, filled: TableRef, folder: Path) -> np.ndarray:
    """What the critic expects at every response token."""
    found = engine.values(filled, str(folder / "valued"))
    assert found is not None
    return np.concatenate(read_table(found)["values"].to_pylist())


def teach(
    engine: TrainActors | MegatronRank, filled: TableRef, folder: Path
) -> tuple[list[np.ndarray], list[dict[str, float]]]:
    """What the critic expects before and after each of two steps on the batch, and what these came to."""
    values, metrics = [expected(engine, filled, folder)], []
    for key in ("first", "second"):
        result = engine.critic_step(filled, TEACH, key)
        assert result is not None and result.applied
        values.append(expected(engine, filled, folder))
        metrics.append(result.metrics)
    return values, metrics


def saved(engine: TrainActors, folder: Path) -> CheckpointRef:
    """A published checkpoint of an engine whose weights were exported as version 2."""
    run = RunFolder(str(folder / "run"), "run")
    ref = engine.save(run.checkpoint(2))
    checkpoints.publish(run, ref)
    return ref


@pytest.fixture(scope="module")
def alone(setup: TrainSetup, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, MegatronRank, object]]:
    """One rank in this process, after two steps on padded batches; the others pack."""
    folder = tmp_path_factory.mktemp("alone")
    rank = MegatronRank(0, 1, replace(setup, perf=PerfSection(train_threads=1, packing=False)))
    rank.connect(*rank.rendezvous())
    outcome = train(rank, folder)
    rank.weights(str(folder / "end"), 2)
    yield folder, rank, outcome
    rank.close()


@pytest.fixture(scope="module")
def exact(setup: TrainSetup, alone: tuple) -> dict[str, float]:
    """Loss and gradient norm of the first step, from logits in double precision of the model transformers makes."""
    _, _, (_, filled, _) = alone
    model = AutoModelForCausalLM.from_pretrained(setup.model_dir, dtype=torch.float64)
    columns: dict[str, list[torch.Tensor]] = {}
    for row in read_table(filled).to_pylist():
        ids = torch.tensor([row["prompt_token_ids"] + row["response_token_ids"]])
        logits = model(ids).logits[0, len(row["prompt_token_ids"]) - 1 : -1] / TEMPERATURE
        found = torch.log_softmax(logits, -1)
        made = {"logprobs": found.gather(1, torch.tensor(row["response_token_ids"])[:, None])[:, 0]}
        made |= {"entropy": -(found.exp() * found).sum(-1), "loss_mask": torch.tensor(row["loss_mask"])}
        for name in ("old_logprobs", "ref_logprobs", "advantages", "importance_weights"):
            made[name] = torch.tensor(row[name], dtype=torch.float64)
        for name, values in made.items():
            columns.setdefault(name, []).append(values)
    padded = {name: torch.nn.utils.rnn.pad_sequence(rows, batch_first=True) for name, rows in columns.items()}
    outputs = policy_loss(UPDATE.loss, **padded, **UPDATE.params)
    outputs.loss.backward()
    norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
    shown = {name: float(value) for name, value in outputs.metrics.items()}
    return {"loss": outputs.loss.item(), "grad_norm": float(norm), **shown}


@pytest.fixture(scope="module")
def taught(alone: tuple, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, torch.Tensor], object]:
    """The critic of one rank between its first step and its second, as transformers names it; what `teach` gave."""
    _, rank, (_, filled, _) = alone
    before = expected(rank, filled, tmp_path_factory.mktemp("before"))
    rank.critic_step(filled, TEACH, "first")
    critic = rank._critic.model.gpt
    with rank._working():
        weights = {name: tensor.clone() for name, tensor in gather_weights(critic, rank._shape)}
    weights["head"] = critic.output_layer.weight.detach().clone()
    values, metrics = teach(rank, filled, tmp_path_factory.mktemp("taught"))
    return weights, ([before, *values[1:]], metrics)


@pytest.fixture(scope="module")
def exact_critic(setup: TrainSetup, alone: tuple, taught: tuple) -> tuple[np.ndarray, dict[str, float]]:
    """Values before its second step, and that step's loss and gradient norm, of a model in double precision."""
    _, _, (_, filled, _) = alone
    weights = dict(taught[0])
    head = weights.pop("head").double().requires_grad_()
    model = AutoModelForCausalLM.from_pretrained(setup.model_dir, dtype=torch.float64)
    model.load_state_dict(weights, strict=False)
    columns: dict[str, list[torch.Tensor]] = {}
    for row in read_table(filled).to_pylist():
        ids = torch.tensor([row["prompt_token_ids"] + row["response_token_ids"]])
        hidden = model.model(ids).last_hidden_state[0, len(row["prompt_token_ids"]) - 1 : -1]
        made = {"values": (hidden @ head.T)[:, 0], "loss_mask": torch.tensor(row["loss_mask"])}
        made |= {"returns": torch.tensor(row["returns"]).double(), "old_values": torch.tensor(row["values"]).double()}
        for name, values in made.items():
            columns.setdefault(name, []).append(values)
    padded = {name: torch.nn.utils.rnn.pad_sequence(rows, batch_first=True) for name, rows in columns.items()}
    outputs = value_loss(padded.pop("values"), **padded, denominators=count(padded["loss_mask"]), **TEACH.params)
    outputs.loss.backward()
    gradients = [parameter.grad for parameter in (*model.parameters(), head)]
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    values = torch.cat(columns["values"]).detach().numpy()
    clipped = float(outputs.metrics["value_clipfrac"])
    return values, {"loss": outputs.loss.item(), "grad_norm": float(norm), "value_clipfrac": clipped}


def require_exact(metrics: dict[str, float], exact: dict[str, float]) -> None:
    for name, wanted in exact.items():
        assert metrics[name] == pytest.approx(wanted, rel=1e-5, abs=1e-6), name


def test_one_rank_computes_the_loss_and_gradient_as_written_down(alone: tuple, exact: dict[str, float]) -> None:
    _, _, (_, _, results) = alone
    require_exact(results[0].metrics, exact)


def test_one_rank_has_the_values_and_their_gradient_as_written_down(taught: tuple, exact_critic: tuple) -> None:
    _, (values, metrics) = taught
    assert not values[0].any()
    np.testing.assert_allclose(values[1], exact_critic[0], rtol=1e-5, atol=1e-5)
    assert 0 < exact_critic[1]["value_clipfrac"] < 1
    require_exact(metrics[1], exact_critic[1])


LAYOUTS = {
    "tensor": ModelSection(tensor_parallel=2),
    "pipeline": ModelSection(pipeline_parallel=2),
    "data": ModelSection(data_parallel=2),
    "sequence": ModelSection(tensor_parallel=2, sequence_parallel=True),
    "context": ModelSection(context_parallel=2),
    "context-sequence": ModelSection(context_parallel=2, tensor_parallel=2, sequence_parallel=True),
    "context-pipeline": ModelSection(context_parallel=2, pipeline_parallel=2),
    "context-data": ModelSection(context_parallel=2, data_parallel=2),
}
FOUR_RANKS = [pytest.param(name, marks=pytest.mark.long) for name, model in LAYOUTS.items() if model.ranks > 2]


@pytest.mark.parametrize("layout", [*(name for name, model in LAYOUTS.items() if model.ranks == 2), *FOUR_RANKS])
def test_ranks_do_what_one_rank_does(
    layout: str,
    setup: TrainSetup,
    alone: tuple,
    exact: dict[str, float],
    taught: tuple,
    exact_critic: tuple,
    tmp_path: Path,
) -> None:
    """Their logits are made in chunks. Two of them keep all activations, four recompute them."""
    folder, rank, (start, filled, results) = alone
    model = LAYOUTS[layout]
    perf = PerfSection(train_threads=1, max_tokens_per_micro_batch=32, recompute="full" if model.ranks > 2 else "none")
    engine = start_train_engine(layout, replace(setup, model=model, perf=perf), rank_class=CHUNKED, timeout_seconds=300)
    try:
        start_two, filled_two, results_two = train(engine, tmp_path)
        assert start_two.version == start.version
        require_exact(results_two[0].metrics, exact)
        for found, wanted in zip(results_two, results, strict=True):
            assert found.applied and found.metrics["loss"] == pytest.approx(wanted.metrics["loss"], abs=1e-6)
            assert found.metrics["grad_norm"] == pytest.approx(wanted.metrics["grad_norm"], rel=1e-4)
        logprobs = [np.concatenate(read_table(ref)["old_logprobs"].to_pylist()) for ref in (filled_two, filled)]
        np.testing.assert_allclose(*logprobs, atol=1e-5)
        end = engine.weights(str(tmp_path / "end"), 2)
        for name, tensor in load_file(folder / "end" / "model.safetensors").items():
            torch.testing.assert_close(tensors(end)[name], tensor, atol=2e-5, rtol=0)

        values, metrics = teach(engine, filled_two, tmp_path)
        require_exact(metrics[1], exact_critic[1])
        np.testing.assert_allclose(values[1], exact_critic[0], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(values[2], taught[1][0][2], rtol=1e-4, atol=1e-4)

        checkpoint = saved(engine, tmp_path)
        engine.step(filled_two, UPDATE, "undone")
        engine.critic_step(filled_two, TEACH, "undone")
        engine.restore(checkpoint)
        assert np.array_equal(expected(engine, filled_two, tmp_path), values[2])
        assert engine.weights(str(tmp_path / "again"), 2).version == end.version
        if model.pipeline_parallel > 1:
            with pytest.raises(ValueError, match="loads only with tensor_parallel 1, pipeline_parallel 2"):
                rank.restore(checkpoint)
            return
        rank.restore(checkpoint)
        assert rank.weights(str(tmp_path / "moved"), 2).version == end.version
        np.testing.assert_allclose(expected(rank, filled_two, tmp_path), values[2], rtol=1e-5, atol=1e-5)
        critics = [each.critic_step(filled_two, TEACH, "third") for each in (rank, engine)]
        norms = [result.metrics["grad_norm"] for result in critics if result]
        assert norms[0] == pytest.approx(norms[1], rel=1e-4)
        third, third_two = rank.step(filled_two, UPDATE, "third"), engine.step(filled_two, UPDATE, "third")
        assert third.metrics["grad_norm"] == pytest.approx(third_two.metrics["grad_norm"], rel=1e-4)
        moved, stayed = rank.weights(str(tmp_path / "one"), 3), engine.weights(str(tmp_path / "two"), 3)
        for name, tensor in tensors(moved).items():
            torch.testing.assert_close(tensors(stayed)[name], tensor, atol=2e-5, rtol=0)
    finally:
        engine.close()


def test_pipeline_stages_with_an_embedding_each_become_one_rank(setup: TrainSetup, tmp_path: Path) -> None:
    """Without tied embeddings a checkpoint of two stages loads on one rank, moments included."""
    untied = AutoModelForCausalLM.from_pretrained(setup.model_dir, tie_word_embeddings=False)
    untied.save_pretrained(tmp_path / "model")
    two = replace(setup, model_dir=str(tmp_path / "model"), model=ModelSection(pipeline_parallel=2))
    engine = start_train_engine("stages", two, rank_class=RANK, timeout_seconds=120)
    try:
        _, filled, _ = train(engine, tmp_path)
        end = engine.weights(str(tmp_path / "end"), 2)
        checkpoint = saved(engine, tmp_path)
        wanted = engine.step(filled, UPDATE, "third")
    finally:
        engine.close()
    one = start_train_engine("stage", replace(two, model=ModelSection()), rank_class=RANK, timeout_seconds=120)
    try:
        one.restore(checkpoint)
        assert one.weights(str(tmp_path / "moved"), 2).version == end.version
        third = one.step(filled, UPDATE, "third")
        assert third.optimizer_step == 3
        assert third.metrics["grad_norm"] == pytest.approx(wanted.metrics["grad_norm"], rel=1e-4)
    finally:
        one.close()


def test_an_engine_that_cannot_start_says_why_and_leaves_no_actor(setup: TrainSetup, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["OtherForCausalLM"]}')
    with pytest.raises(ValueError, match="architecture 'OtherForCausalLM' cannot be trained, use one of"):
        start_train_engine("broken", replace(setup, model_dir=str(tmp_path)), rank_class=RANK, timeout_seconds=120)
    with pytest.raises(LookupError, match="no engine called 'broken/train-0'"):
        connect_train_engine("broken", 1, timeout_seconds=5)
