"""Scores of a data set under the weights that engines hold: what a policy can do, apart from what it is trained on.

Samples are generated and scored by the tasks that a step uses, shard by shard: what was committed is not made again.
"""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
from prefect import task
from prefect.cache_policies import NO_CACHE

from milepost.storage.eval_sets import set_rows, shard_count, temperature
from milepost.storage.journal import Slot, StepStore
from milepost.storage.parameters import EvalSet, Parameters, RewardSection, RolloutSection
from milepost.storage.runs import RunRecord
from milepost.storage.schema import PROMPTS, ROLLOUTS
from milepost.storage.tables import TableRef, concat, read_table
from milepost.tasks.eval_scores import SetScore, set_score
from milepost.tasks.generate import Shard, generate_rollouts
from milepost.tasks.prompt_reward import of_eval_set
from milepost.tasks.sampling import Sampling, TokenizerFolder, sampling_params
from milepost.tasks.score import score_rollouts
from milepost.tasks.tools import tool_rules


@dataclass(frozen=True)
class SetPlan:
    """A data set as it is evaluated; `index` is its place among the sets, and the round of its commits."""

    index: int
    eval_set: EvalSet
    sampling: Sampling
    rollout: RolloutSection
    reward: RewardSection

    @property
    def name(self) -> str:
        return self.eval_set.name

    def config(self, weight_version: str) -> dict[str, Any]:
        """What decides the result; a set of one greedy sample a prompt is identified as it always was."""
        chosen = self.sampling
        found = {
            "params": chosen.params,
            "reward": self.reward.model_dump(mode="json"),
            "weight_version": weight_version,
        }
        own = {
            "set": self.index or None,
            "n": chosen.n_samples_per_prompt if chosen.n_samples_per_prompt > 1 else None,
            "seed": chosen.seed if chosen.params["temperature"] else None,
            "tools": chosen.identity().get("tools"),
        }
        return found | {name: value for name, value in own.items() if value is not None}

    def shards(self, prompts: int) -> int:
        return shard_count(self.eval_set, prompts)


def greedy(sampling: Sampling) -> Sampling:
    """The same lengths and stops, one sample a prompt, always the likeliest token."""
    params = sampling.params | {"temperature": 0.0, "top_p": 1.0, "top_k": -1}
    return replace(sampling, params=params, n_samples_per_prompt=1)


def set_plans(sets: Sequence[EvalSet], parameters: Parameters, record: RunRecord) -> list[SetPlan]:
    """How each set of a run is evaluated; `parameters` are those of its record, with their secrets."""
    folder, vocabulary = record.model["folder"], record.vocabulary
    return [set_plan(at, item, parameters, model_folder=folder, vocabulary=vocabulary) for at, item in enumerate(sets)]


def set_plan(
    index: int, eval_set: EvalSet, parameters: Parameters, *, model_folder: str = "", vocabulary: int = 0
) -> SetPlan:
    """How a set is evaluated: what it leaves open is as the run has it. `model_folder` is for a run with tools."""
    rollout = parameters.rollout
    updates: dict[str, Any] = {"top_p": eval_set.top_p, "top_k": eval_set.top_k}
    updates |= {"max_new_tokens": eval_set.max_new_tokens} if eval_set.max_new_tokens else {}
    updates |= {"stop": eval_set.stop} if eval_set.stop else {}
    rollout = rollout.model_copy(update=updates)
    params = sampling_params(rollout) | {"temperature": temperature(eval_set)}
    sampling = Sampling(
        rollout.function,
        params,
        eval_set.n_samples_per_prompt,
        parameters.model.context_length,
        parameters.data.seed,
        vocabulary=vocabulary,
        tools=tool_rules(rollout),
        tokenizer=TokenizerFolder.of(parameters.model, model_folder),
    )
    reward = of_eval_set(eval_set, parameters.reward)
    return SetPlan(index, eval_set, sampling if params["temperature"] else greedy(sampling), rollout, reward)


def _served(prompts: pa.Table, step: int, index: int) -> pa.Table:
    """Prompts that no step serves, with groups of their own: requests are told apart by them."""
    place = prompts.schema.get_field_index("group_id")
    names = [f"eval-{step:06d}-{index}-{row:06d}" for row in range(prompts.num_rows)]
    return prompts.set_column(place, prompts.schema.field(place), pa.array(names, pa.string()))


def serve(prompts: TableRef, plan: SetPlan, store: StepStore) -> TableRef:
    """The prompts of the set, as they are served."""
    started = time.monotonic()
    slot = Slot("sample", plan.index)
    key = store.key(slot, [prompts], {"set": plan.name})
    commit = store.committed(slot, key)
    if commit is None:
        table = _served(set_rows(read_table(prompts), plan.name), store.step, plan.index)
        commit = store.commit(slot, key, {"prompts": store.write(str(slot), table, PROMPTS)}, started=started)
    return commit.tables["prompts"]


def result_slot(index: int) -> Slot:
    """Where the scores of set `index` are committed, with the table of all its samples."""
    return Slot("evaluate", index)


@task(task_run_name="evaluate-{store.step}-{plan.name}", cache_policy=NO_CACHE)
async def evaluate_set(
    prompts: TableRef,
    plan: SetPlan,
    *,
    weight_version: str,
    router_url: str,
    store: StepStore,
    advance: Callable[[str], None] = lambda shown: None,
    graders: str = "",
) -> SetScore:
    """The score of the weights that engines hold on one set of `prompts`; `advance` is called for each shard made now.

    `graders` names the run whose they are, when that is not the one that is evaluated.
    """
    started = time.monotonic()
    slot = result_slot(plan.index)
    key = store.key(slot, [prompts], plan.config(weight_version))
    commit = store.committed(slot, key)
    if commit is None:
        served = serve(prompts, plan, store)
        gate = asyncio.Semaphore(plan.rollout.shards)
        count = plan.shards(served.rows)

        async def one(index: int) -> TableRef:
            shard = Shard(index, count, plan.index)
            made_before = store.stored(Slot("score", plan.index, index)) is not None
            async with gate:
                generated = await generate_rollouts.fn(
                    served,
                    shard,
                    plan.sampling,
                    plan.rollout,
                    weight_version=weight_version,
                    router_url=router_url,
                    store=store,
                )
                scored: TableRef = await score_rollouts.fn(
                    generated, shard, plan.reward, run=graders or store.run_id, store=store
                )
            if not made_before:
                advance(plan.name)
            return scored

        async with asyncio.TaskGroup() as group:
            running = [group.create_task(one(index)) for index in range(count)]
        table = concat([read_table(done.result()) for done in running], ROLLOUTS).sort_by("sample_id")
        record = vars(set_score(table, plan.eval_set))
        tables = {"rollouts": store.write(str(slot), table, ROLLOUTS)}
        commit = store.commit(slot, key, tables, record=record, started=started)
    score = set_score(read_table(commit.tables["rollouts"]), plan.eval_set)
    # Nothing of it may be an object that the plan has, too: Prefect would see an edge to whatever gets the plan.
    return SetScore(**json.loads(json.dumps(vars(score))))
