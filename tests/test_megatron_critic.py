"""One Megatron rank with a critic: it begins at zero, learns beside the policy, and is saved and restored with it."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from milepost.engines.megatron_rank import MegatronRank
from milepost.engines.protocols import VALUE_LOSS, UpdateParams
from milepost.engines.train_actors import CriticSetup, TrainSetup
from milepost.storage import checkpoints
from milepost.storage.runs import RunFolder
from milepost.storage.schema import ROLLOUTS
from milepost.storage.tables import TableRef, read_table, with_columns, write_table
from milepost.storage.training import OptimizerSection, PerfSection

from .test_megatron_rank import UPDATE, Ranks, rollouts, saved, setup

__all__ = ["setup"]

pytestmark = pytest.mark.slow

TEACH = UpdateParams(VALUE_LOSS, {"value_clip": 10.0, "aggregation": "token_mean"})
SPEED = {"seconds", "tokens_per_second", "tflops"}


@pytest.fixture
def ranks(setup: TrainSetup) -> Iterator[Ranks]:
    """Each with a critic that begins as the policy."""
    running = Ranks(replace(setup, critic=CriticSetup(setup.model_dir, OptimizerSection(lr=1e-2))))
    yield running
    running.stop()


def batch(folder: Path, rank: MegatronRank | None = None) -> TableRef:
    """Samples that return 1 and 0 in turn, with the values that `rank` expects, or zeros."""
    table = rollouts()
    lengths = [len(row) for row in table["loss_mask"].to_pylist()]
    returns: list[Any] = [[float(index % 2 == 0)] * tokens for index, tokens in enumerate(lengths)]
    zeros: list[Any] = [[0.0] * tokens for tokens in lengths]
    ref = write_table(str(folder / "batch"), with_columns(table, {"returns": returns, "values": zeros}), ROLLOUTS)
    if rank is None:
        return ref
    found = rank.values(ref, str(folder / "values"))
    assert found is not None
    return found


def expected(rank: MegatronRank, folder: Path) -> np.ndarray:
    return np.concatenate(read_table(batch(folder, rank))["values"].to_pylist())


def learnt(rank: MegatronRank, ref: TableRef, key: str) -> dict[str, float]:
    result = rank.critic_step(ref, TEACH, key)
    assert result is not None and result.applied
    return {name: value for name, value in result.metrics.items() if name not in SPEED}


def test_values_begin_at_zero_and_the_first_step_moves_the_head_alone(ranks: Ranks, tmp_path: Path) -> None:
    rank = ranks.start()
    before = {name: weight.clone() for name, weight in rank._critic.model.gpt.named_parameters()}
    ref = batch(tmp_path, rank)
    assert not expected(rank, tmp_path).any()
    lengths = [len(row) for row in rollouts()["loss_mask"].to_pylist()]
    assert learnt(rank, ref, "a")["value_loss"] == pytest.approx(sum(lengths[::2]) / sum(lengths))
    moved = [name for name, weight in rank._critic.model.gpt.named_parameters() if not weight.equal(before[name])]
    assert moved == ["output_layer.weight"] and expected(rank, tmp_path).all()


def test_a_critic_learns_and_leaves_the_policy_as_it_is(ranks: Ranks, tmp_path: Path) -> None:
    rank = ranks.start()
    policy = rank.digest()
    losses = [learnt(rank, batch(tmp_path, rank), str(step))["value_loss"] for step in range(30)]
    assert losses[-1] < losses[0] / 3 and rank.digest() == policy
    critic = expected(rank, tmp_path)
    assert rank.step(batch(tmp_path), UPDATE, "a").applied and rank.step(batch(tmp_path), UPDATE, "b").applied
    assert rank.digest() != policy and np.array_equal(expected(rank, tmp_path), critic)


def test_its_result_does_not_depend_on_the_micro_batches(ranks: Ranks, tmp_path: Path) -> None:
    found = []
    for changes in ({}, {"max_tokens_per_micro_batch": 40}, {"max_tokens_per_micro_batch": 64, "packing": False}):
        rank = ranks.start(perf=PerfSection(train_threads=1, **changes))
        steps = [learnt(rank, batch(tmp_path, rank), key) for key in "abc"]
        numbers = [step[name] for step in steps for name in ("loss", "grad_norm", "value_clipfrac")]
        found.append([*numbers, *expected(rank, tmp_path)])
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], rtol=2e-5, atol=1e-5)


def test_it_is_cut_as_the_policy_and_applies_a_key_once(ranks: Ranks, tmp_path: Path) -> None:
    rank = ranks.start(perf=PerfSection(train_threads=1, max_tokens_per_micro_batch=40, balance="flops"))
    ref = batch(tmp_path)
    result = rank.critic_step(ref, TEACH, "a")
    assert result is not None and result.micro_batches == rank.step(ref, UPDATE, "a").micro_batches
    values = expected(rank, tmp_path)
    assert rank.critic_step(ref, TEACH, "a") is result and np.array_equal(expected(rank, tmp_path), values)
    with pytest.raises(ValueError, match="sample 's0' has no returns: fill the column before the critic's step"):
        rank.critic_step(
            write_table(str(tmp_path / "x"), with_columns(read_table(ref), {"returns": [None] * 8}), ROLLOUTS),
            TEACH,
            "b",
        )


def test_a_loss_that_is_not_finite_leaves_the_critic_alone(ranks: Ranks, tmp_path: Path) -> None:
    rank = ranks.start()
    returns = read_table(batch(tmp_path))["returns"].to_pylist()
    returns[0] = [float("inf")] * len(returns[0])
    table = with_columns(read_table(batch(tmp_path)), {"returns": returns})
    result = rank.critic_step(write_table(str(tmp_path / "x"), table, ROLLOUTS), TEACH, "a")
    assert result is not None and (result.applied, result.optimizer_step) == (False, 0)
    assert not expected(rank, tmp_path).any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_restored_critic_goes_on_bit_for_bit(dtype: str, ranks: Ranks, tmp_path: Path) -> None:
    run = RunFolder(str(tmp_path / "run"), "run")
    perf = PerfSection(train_threads=1, dtype=dtype)
    rank = ranks.start(perf=perf)
    for key in ("a", "b"):
        learnt(rank, batch(tmp_path, rank), key)
    checkpoint = saved(rank, run, 0)
    assert (checkpoint.last_key, checkpoints.latest(run)) == ("b", checkpoint)
    wanted = [learnt(rank, batch(tmp_path, rank), key) for key in ("c", "d")]
    values = expected(rank, tmp_path)
    for is_new in (False, True):
        rank = ranks.start(perf=perf) if is_new else rank
        rank.restore(checkpoint)
        known = rank.critic_step(batch(tmp_path), TEACH, "b")
        assert known is not None and known.optimizer_step == 2
        assert [learnt(rank, batch(tmp_path, rank), key) for key in ("c", "d")] == wanted
        assert np.array_equal(expected(rank, tmp_path), values)


def test_a_critic_is_as_new_where_none_was_saved_and_left_alone_where_none_is_wanted(
    ranks: Ranks, tmp_path: Path
) -> None:
    run = RunFolder(str(tmp_path / "run"), "run")
    without = saved(ranks.start(critic=None), run, 0)
    rank = ranks.start()
    learnt(rank, batch(tmp_path, rank), "a")
    rank.weights(str(tmp_path / "weights"), 1)
    with_one = saved(rank, run, 1)
    rank.restore(without)
    assert not expected(rank, tmp_path).any() and learnt(rank, batch(tmp_path), "a")["lr"] == 1e-2
    rank = ranks.start(critic=None)
    rank.restore(with_one)
    assert rank.critic_step(batch(tmp_path), TEACH, "b") is None
    with pytest.raises(ValueError, match="has no critic to ask for values: set algorithm.advantage=gae"):
        rank.values(batch(tmp_path), str(tmp_path / "values"))


def test_memory_that_was_given_up_comes_back_with_the_critic(ranks: Ranks, tmp_path: Path) -> None:
    rank = ranks.start()
    wanted = [learnt(rank, batch(tmp_path, rank), key) for key in ("a", "b")]
    rank, found = ranks.start(), []
    for key in ("a", "b"):
        rank._park()
        assert {tensor.untyped_storage().nbytes() for tensor in rank._critic.model.kept()} == {0}
        found.append(learnt(rank, batch(tmp_path, rank), key))
    assert found == wanted
