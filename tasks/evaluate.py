"""Greedy accuracy on held-out prompts, with its interval: what a policy can do, apart from what it is trained on."""

import math
import time
from dataclasses import dataclass, replace

import pyarrow as pa
from prefect import task
from prefect.cache_policies import NO_CACHE

from milepost.engines.graders import GraderPool
from milepost.storage.journal import Slot, StepStore
from milepost.storage.parameters import RewardSection, RolloutSection
from milepost.storage.schema import ROLLOUTS
from milepost.storage.tables import TableRef, read_table
from milepost.tasks.generate import Sampling, generate_table, prompts_of
from milepost.tasks.samples import Prompt
from milepost.tasks.score import verdicts_of, with_verdicts

Z_95 = 1.959963984540054


@dataclass(frozen=True)
class Accuracy:
    """Mean score in [0, 1] of `count` prompts with its 95 % Wilson interval (Wilson 1927, JASA 22:209)."""

    mean: float
    low: float
    high: float
    count: int


def wilson(mean: float, count: int) -> Accuracy:
    """The interval of a mean of `count` scores in [0, 1]; [0, 1] when there are none."""
    if count == 0:
        return Accuracy(math.nan, 0.0, 1.0, 0)
    square = Z_95 * Z_95
    centre = (mean + square / (2 * count)) / (1 + square / count)
    half = Z_95 / (1 + square / count) * math.sqrt(mean * (1 - mean) / count + square / (4 * count * count))
    return Accuracy(mean, max(0.0, centre - half), min(1.0, centre + half), count)


def greedy(sampling: Sampling) -> Sampling:
    """The same lengths and stops, one sample a prompt, always the likeliest token."""
    return Sampling(
        function=sampling.function,
        params=sampling.params | {"temperature": 0.0, "top_p": 1.0, "top_k": -1},
        n_samples_per_prompt=1,
        context_length=sampling.context_length,
        seed=sampling.seed,
    )


def accuracy(table: pa.Table) -> Accuracy:
    """Over the scorable samples; scores outside [0, 1] are clipped to it."""
    scores = [min(1.0, max(0.0, score)) for score in table["reward"].to_pylist() if score is not None]
    return wilson(sum(scores) / len(scores) if scores else math.nan, len(scores))


def _named(prompts: list[Prompt], step: int) -> list[Prompt]:
    """Prompts that no step serves, with groups of their own: requests are told apart by them."""
    return [replace(prompt, group_id=f"eval-{step:06d}-{row:06d}") for row, prompt in enumerate(prompts)]


@task(task_run_name="evaluate-{store.step}", cache_policy=NO_CACHE)
async def evaluate_policy(
    prompts: TableRef,
    sampling: Sampling,
    rollout: RolloutSection,
    reward: RewardSection,
    *,
    weight_version: str,
    router_url: str,
    store: StepStore,
) -> Accuracy:
    """Accuracy of the weights the engines hold, on every row of `prompts`; its samples are kept as a table."""
    started = time.monotonic()
    slot = Slot("evaluate")
    chosen = greedy(sampling)
    config = {"params": chosen.params, "reward": reward.model_dump(mode="json"), "weight_version": weight_version}
    key = store.key(slot, [prompts], config)
    commit = store.committed(slot, key)
    if commit is None:
        place = {"run_id": store.run_id, "step": store.step, "shard": 0}
        served = _named(prompts_of(read_table(prompts)), store.step)
        table = await generate_table(served, chosen, rollout, router_url=router_url, place=place)
        pool = GraderPool.connect(store.run_id, workers=reward.workers)
        scored = with_verdicts(table, await verdicts_of(table, reward, pool=pool))
        ref = store.write(str(slot), scored, ROLLOUTS)
        commit = store.commit(slot, key, {"rollouts": ref}, record=vars(accuracy(scored)), started=started)
    return Accuracy(**commit.record)
