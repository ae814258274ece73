"""What a run holds of itself: each violation is found with its numbers, and nothing of its step is committed."""

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from milepost.engines.embedded_request import SamplingParams
from milepost.engines.fake_rank import FakeRank
from milepost.engines.megatron_logprobs import OutputLayer, taken_logprobs
from milepost.engines.protocols import Role, TrainEngine, UpdateParams, UpdateResult
from milepost.flows.recipe import load_recipe
from milepost.storage import attempts
from milepost.storage.journal import Slot, StepStore
from milepost.storage.schema import ROLLOUTS, from_rows
from milepost.storage.tables import TableRef, read_table, with_columns, write_table
from milepost.tasks.optimize import Optimized, optimize_policy
from milepost.tasks.self_check import SelfCheck, SelfCheckFailed, require_plan
from milepost.tasks.update import Update

from .test_megatron_rank import Ranks, ranks, rollouts, setup  # noqa: F401  (fixtures)
from .test_sampling import draw_rows
from .test_tables import rollout

KNOBS = ["data.rollout_batch_size=2", "data.n_samples_per_prompt=2", "algorithm.num_steps_per_rollout=2"]
VERSION = "3-ab"


class LyingRank(FakeRank):
    """A trainer that answers all roles of `off` wrongly by so much, and says `metrics` of each of its steps."""

    def __init__(self, off: dict[Role, float] | None = None, **metrics: float) -> None:
        super().__init__(0, 1, None)
        self._off = off or {}
        self._said = metrics

    def logprobs(self, batch: TableRef, role: Role, uri: str) -> TableRef:
        table = read_table(super().logprobs(batch, role, uri))
        column = "old_logprobs" if role == "policy" else "ref_logprobs"
        off = [[value - self._off.get(role, 0.0) for value in row] for row in table[column].to_pylist()]
        return write_table(uri, with_columns(table, {column: list(off)}), ROLLOUTS)

    def step(self, batch: TableRef, update: UpdateParams, key: str) -> UpdateResult:
        done = super().step(batch, update, key)
        return UpdateResult(key, done.applied, done.optimizer_step, done.metrics | self._said)


def kept(*changes: dict[str, Any]) -> list[dict[str, object]]:
    """Two groups of two samples, of the weights that the step begins with, and what is other about some of them."""
    rows = [rollout(f"g{at // 2}-{at % 2}", group_id=f"g{at // 2}", kept=True, reward=at % 2) for at in range(4)]
    return [row | (changes[at] if at < len(changes) else {}) for at, row in enumerate(rows)]


def optimized(
    folder: Path, engine: TrainEngine, rows: Sequence[dict[str, object]], *overrides: str, step: int = 3
) -> Optimized:
    """The optimize stage of a step on `rows`, held as a run would."""
    store = StepStore(str(folder), "run", step)
    chosen, _ = load_recipe(None, [*KNOBS, *overrides])
    update = Update.of(chosen)
    filtered = store.write("filtered", from_rows(list(rows), ROLLOUTS), ROLLOUTS)
    return asyncio.run(
        optimize_policy.fn(
            [filtered],
            update,
            weight_version=VERSION,
            engine=engine,
            store=store,
            check=SelfCheck.of(chosen, update),
        )
    )


def refused(folder: Path, *given: Any, match: str, **options: Any) -> None:
    with pytest.raises(SelfCheckFailed, match=match):
        optimized(folder, *given, **options)
    assert StepStore(str(folder), "run", options.get("step", 3)).stored(Slot("optimize")) is None


def test_an_engine_that_lies_stops_the_step_before_it_is_trained_and_goes_on_when_it_may(tmp_path: Path) -> None:
    engine = LyingRank({"policy": 0.5})
    weights = engine.digest()
    match = "step 3: log-probabilities of trainer and rollout engine are 0.5 apart in the mean of 8 tokens, .* is 0.1:"
    refused(tmp_path, engine, kept(), match=match)
    assert engine.digest() == weights
    done = optimized(tmp_path, engine, kept(), "check.max_logprob_difference=0.6")
    assert len(done.results) == 2 and done.mismatch["mismatch/kl"] == pytest.approx(0.5, rel=1e-6)


@pytest.mark.parametrize(
    ("changes", "overrides"),
    [
        ({}, ["algorithm.old_logprobs=rollout"]),
        ({}, ["check.enabled=false"]),
        ({"weight_version_min": 2}, []),
        ({"weights_digest": "cd"}, []),
        ({"weight_version_min": None, "weight_version_max": None, "weights_digest": None}, []),
        ({"rollout_logprobs": None}, []),
    ],
)
def test_engines_are_only_compared_where_they_must_agree(
    tmp_path: Path, changes: dict[str, Any], overrides: list[str]
) -> None:
    found = optimized(tmp_path, LyingRank({"policy": 0.5}), kept(changes), *overrides)
    assert len(found.results) == 2 and bool(found.mismatch) == ("algorithm.old_logprobs=rollout" not in overrides)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_log_probabilities_that_are_no_numbers_stop_the_step(tmp_path: Path, bad: float) -> None:
    refused(tmp_path, LyingRank({"policy": bad}), kept(), match=f"are {bad} apart in the mean of 8 tokens")


def test_a_reference_that_is_the_policy_has_no_divergence_from_it(tmp_path: Path) -> None:
    wanted, match = ["algorithm.kl_loss_coef=0.1"], "policy and reference are 0.25 apart in the mean of 8 tokens, both"
    first = kept(*[{"weight_version_min": 0, "weight_version_max": 0}] * 4)
    refused(tmp_path, LyingRank({"reference": 0.25}), first, *wanted, match=match, step=0)
    renewed = [*wanted, "reference.refresh_every_steps=3"]
    refused(tmp_path, LyingRank({"reference": 0.25}), kept(), *renewed, match=match, step=3)
    assert optimized(tmp_path / "later", LyingRank({"reference": 0.25}), kept(), *wanted, step=3).results


@pytest.mark.parametrize(
    ("metrics", "overrides", "match"),
    [
        ({"ratio_mean": 1.01}, [], "mean ratio of 1.01 and 0 of its tokens clipped.* up to 0.0001 from 1"),
        ({"ratio_mean": 1.0, "pg_clipfrac": 0.1}, [], "ratio of 1 and 0.1 of its tokens clipped.* and 0 is rounding"),
        ({"ratio_mean": 1.1}, ["perf.dtype=bfloat16"], "ratio of 1.1 and 0 of its tokens clipped.* up to 0.05 from 1"),
    ],
)
def test_the_first_optimizer_step_is_on_policy(
    tmp_path: Path, metrics: dict[str, float], overrides: list[str], match: str
) -> None:
    said = f"step 3: the first optimizer step has a .*{match}"
    refused(tmp_path, LyingRank(**metrics), kept(), *overrides, match=said)
    assert optimized(tmp_path, LyingRank(**metrics), kept(), *overrides, "check.enabled=false").results


def test_rounding_in_bfloat16_and_a_clip_range_narrower_than_it_are_no_violation(tmp_path: Path) -> None:
    engine = LyingRank(ratio_mean=1.01, pg_clipfrac=0.005)
    assert optimized(tmp_path / "a", engine, kept(), "perf.dtype=bfloat16").results
    engine = LyingRank(ratio_mean=1.0, pg_clipfrac=0.3)
    assert optimized(tmp_path / "b", engine, kept(), "perf.dtype=bfloat16", "algorithm.clip_low=3e-4").results


@pytest.mark.parametrize("column", ["loss_mask", "rollout_logprobs"])
def test_columns_have_a_number_for_each_token(tmp_path: Path, column: str) -> None:
    match = f"step 3: sample g0-1 has 1 numbers in {column} for 2 tokens, and they must be as many"
    refused(tmp_path, LyingRank(), kept({}, {column: [1]}), match=match)


def test_batches_are_those_of_the_four_knobs() -> None:
    chosen, _ = load_recipe(None, KNOBS)
    plan, table = Update.of(chosen).plan, from_rows(kept(), ROLLOUTS)
    require_plan(table, [table.slice(0, 2), table.slice(2)], plan, step=0)
    require_plan(table.slice(0, 3), [table.slice(0, 2), table.slice(2, 1)], plan, step=0)
    wrong: dict[str, list[Any]] = {
        r"4 samples are cut into batches of \[3, 1\], with 4 different ones": [table.slice(0, 3), table.slice(3)],
        r"batches of \[2, 2\], with 2 different ones, and the plan is \[2, 2\]": [table.slice(0, 2)] * 2,
        r"batches of \[2\], with 2": [table.slice(0, 2)],
    }
    for match, parts in wrong.items():
        with pytest.raises(SelfCheckFailed, match=match):
            require_plan(table, parts, plan, step=0)


def test_what_is_checked_may_change_when_a_run_goes_on() -> None:
    before, after = (load_recipe(None, given)[0] for given in ([], ["check.max_logprob_difference=0.5"]))
    attempts.require_allowed(attempts.changes(before, after), [])
    with pytest.raises(ValueError, match="--allow-change off_policy.weights"):
        attempts.require_allowed(attempts.changes(before, load_recipe(None, ["off_policy.weights=clip"])[0]), [])


def test_temperature_is_the_same_in_trainer_and_engine() -> None:
    """Logits 2, 1, 0 at temperature 0.5: neither -0.407606, that of temperature 1, nor its double."""
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    tokens, engine = draw_rows(logits, [SamplingParams(temperature=0.5, top_k=1)], [0])
    hidden, layer = torch.ones(1, 1), OutputLayer(logits.t(), 3)
    trainer = taken_logprobs(hidden, torch.tensor([0]), torch.tensor(tokens), temperature=0.5, layer=layer)
    assert tokens == [0] and engine == pytest.approx([-0.142932], abs=1e-6)
    assert math.exp(float(trainer) - engine[0]) == pytest.approx(1, abs=1e-6)


@pytest.mark.slow
def test_a_trainer_at_another_temperature_than_the_engine_is_found(ranks: Ranks, tmp_path: Path) -> None:  # noqa: F811
    """A step whose engine drew at 0.8, on a trainer that is built with 1, and on one with 0.8."""
    made = write_table(str(tmp_path / "made"), rollouts(), ROLLOUTS)
    scored = ranks.start(temperature=0.8).logprobs(made, "policy", str(tmp_path / "scored"))
    assert scored is not None
    stamps = {"weight_version_min": [3] * 8, "weight_version_max": [3] * 8, "weights_digest": ["ab"] * 8}
    columns = {"rollout_logprobs": read_table(scored)["old_logprobs"].to_pylist(), "reward": [0.0, 1.0] * 4, **stamps}
    rows = with_columns(rollouts(), columns).to_pylist()
    knobs = ["data.rollout_batch_size=1", "data.n_samples_per_prompt=8"]
    match = "trainer and rollout engine are 0.[0-9]* apart in the mean of [0-9]* tokens, both of weights 3-ab"
    refused(tmp_path, ranks.start(temperature=1.0), rows, *knobs, "check.max_logprob_difference=0.01", match=match)
    done = optimized(tmp_path, ranks.start(temperature=0.8), rows, *knobs)
    assert done.mismatch["mismatch/logprob_abs_diff"] < 1e-5 and done.mismatch["mismatch/ess"] == pytest.approx(1)
    assert done.results[0].metrics["ratio_mean"] == pytest.approx(1, abs=1e-5)
