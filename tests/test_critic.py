"""The critic in an optimize stage, on a fake trainer: who is taught what, in which order, and how it is counted."""

from pathlib import Path

import pytest

from milepost.engines.fake_rank import FakeRank
from milepost.engines.protocols import UpdateParams, UpdateResult
from milepost.engines.train_actors import CriticSetup, TrainSetup
from milepost.storage.journal import Slot, StepStore
from milepost.storage.parameters import ModelSection
from milepost.storage.tables import TableRef, read_table
from milepost.storage.training import OptimizerSection, PerfSection
from milepost.tasks.optimize import TooManySkips, replay

from .test_self_check import kept, optimized

GAE = "algorithm.advantage=gae"


class TaughtRank(FakeRank):
    """With a critic, unless it is told otherwise; it remembers who took which step, and may learn nothing."""

    def __init__(self, *, critic: bool = True, learns: bool = True) -> None:
        optimizer = OptimizerSection()
        taught = CriticSetup("", optimizer) if critic else None
        super().__init__(0, 1, TrainSetup("", ModelSection(), optimizer, PerfSection(), 1.0, 0, critic=taught))
        self.order: list[str] = []
        self._learns = learns

    def step(self, batch: TableRef, update: UpdateParams, key: str) -> UpdateResult:
        self.order.append(f"policy {key[-1]}")
        return super().step(batch, update, key)

    def critic_step(self, batch: TableRef, update: UpdateParams, key: str) -> UpdateResult | None:
        self.order.append(f"critic {key[-1]}")
        found = super().critic_step(batch, update, key)
        return found if self._learns or not found else UpdateResult(key, False, 0, {"loss": float("inf")})


def test_each_batch_teaches_the_critic_first_and_then_the_policy(tmp_path: Path) -> None:
    engine = TaughtRank()
    done = optimized(tmp_path, engine, kept(), GAE)
    assert engine.order == ["critic 0", "policy 0", "critic 1", "policy 1"]
    assert done.critic and [result.key for result in done.critic.results] == [result.key for result in done.results]
    # Values were 0 everywhere before, so the return is the reward; the critic goes half of the way twice.
    assert [result.metrics["value_loss"] for result in done.critic.results] == [0.5, pytest.approx(0.3125)]
    assert [read_table(ref)["values"].to_pylist() for ref in done.batches] == [[[0.0, 0.0]] * 2] * 2


def test_before_the_policy_is_trained_the_critic_is_alone(tmp_path: Path) -> None:
    engine = TaughtRank()
    before = engine.digest()
    done = optimized(tmp_path, engine, kept(), GAE, "critic.pretrain_steps=4")
    assert (done.results, engine.order, engine.digest()) == ([], ["critic 0", "critic 1"], before)
    optimized(tmp_path / "next", engine, kept(), GAE, "critic.pretrain_steps=4", step=4)
    assert engine.digest() != before


def test_what_was_committed_is_taught_again_once_and_by_an_engine_without_a_critic_to_the_policy_alone(
    tmp_path: Path,
) -> None:
    engine = TaughtRank()
    optimized(tmp_path, engine, kept(), GAE)
    commit = StepStore(str(tmp_path), "run", 3).stored(Slot("optimize"))
    assert commit is not None
    state = engine._critic.state()
    other, without = TaughtRank(), TaughtRank(critic=False)
    for each in (engine, other, without):
        assert replay(commit, each) == 2 and each.digest() == engine.digest()
    assert other._critic.state() == engine._critic.state() == state


def test_a_critic_that_cannot_learn_stops_the_run_as_a_policy_does(tmp_path: Path) -> None:
    engine = TaughtRank(learns=False)
    done = optimized(tmp_path / "000003", engine, kept(), GAE, "algorithm.max_skipped_steps=2")
    assert done.applied == [False, False] and all(result.applied for result in done.results)
    with pytest.raises(TooManySkips, match="4 optimizer steps in a row .* allows 2: lower critic.lr, or look at"):
        optimized(tmp_path / "000004", engine, kept(), GAE, "algorithm.max_skipped_steps=2", step=4)
