"""What the samples of a step are given before any of them is trained on: log-probabilities, values and advantages.

All of it is worked out once for the whole step, from the weights that the step begins with.
"""

import asyncio
from typing import Any

import pyarrow as pa

from milepost.engines.protocols import Role, TrainEngine
from milepost.storage.journal import StepStore
from milepost.storage.schema import ROLLOUTS
from milepost.storage.tables import read_table, with_columns
from milepost.storage.training import AlgorithmSection
from milepost.tasks.advantages import DISCOUNTED, NORMALISED, PER_TOKEN, finished_columns, raw_columns
from milepost.tasks.token_returns import returns_to_learn
from milepost.tasks.update import Update


async def prepare(table: pa.Table, update: Update, *, engine: TrainEngine, store: StepStore) -> pa.Table:
    """The samples with the log-probabilities that the loss compares, and their advantages."""
    if update.algorithm.old_logprobs == "rollout":
        require_logprobs(table)
        table = with_columns(table, {"old_logprobs": table["rollout_logprobs"].to_pylist()})
    else:
        table = await _scored(table, "policy", engine=engine, store=store)
    if update.compares:
        table = await _scored(table, "reference", engine=engine, store=store)
    if update.critic:
        ref = store.write("for-critic", table, ROLLOUTS)
        table = read_table(await asyncio.to_thread(engine.values, ref, f"{store.uri}/values"))
    return with_advantages(table, update.algorithm)


async def _scored(table: pa.Table, role: Role, *, engine: TrainEngine, store: StepStore) -> pa.Table:
    """The table with the log-probabilities of the policy, or of the reference."""
    ref = store.write(f"for-{role}", table, ROLLOUTS)
    return read_table(await asyncio.to_thread(engine.logprobs, ref, role, f"{store.uri}/logprobs-{role}"))


def require_logprobs(table: pa.Table) -> None:
    """ValueError when samples that were made elsewhere came without the log-probabilities they were sampled with."""
    lacking = table["rollout_logprobs"].null_count
    if lacking:
        raise ValueError(
            f"{lacking} of {table.num_rows} samples have no rollout_logprobs: set algorithm.old_logprobs=recompute"
        )


def with_advantages(table: pa.Table, algorithm: AlgorithmSection) -> pa.Table:
    """The table of a whole step with its advantages: statistics over samples and tokens are those of the step.

    Where a critic has said what it expects, also with what it is to expect: that is told before they are whitened.
    """
    raw = raw_columns(table, algorithm.advantage, **_advantage_params(algorithm))
    columns: dict[str, list[Any]] = {}
    if algorithm.has_critic:
        columns["returns"] = returns_to_learn(table, raw)
    columns["advantages"] = finished_columns(table, algorithm.advantage, raw, whiten=algorithm.whiten_advantages)
    return with_columns(table, columns)


def _advantage_params(algorithm: AlgorithmSection) -> dict[str, Any]:
    params: dict[str, Any] = {}
    if algorithm.advantage in NORMALISED:
        params["normalize_std"] = algorithm.normalize_std
    if algorithm.advantage in PER_TOKEN:
        params |= {"kl_coef": algorithm.kl_reward_coef, "kl_estimator": algorithm.kl_estimator}
    if algorithm.advantage in DISCOUNTED:
        params["gamma"] = algorithm.gamma
    if algorithm.has_critic:
        params["gae_lambda"] = algorithm.gae_lambda
    return params
