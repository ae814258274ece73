"""The second node: samples for the prompts of one shard, over HTTP through the router."""

import asyncio
import hashlib
import time
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa
from prefect import task
from prefect.cache_policies import NO_CACHE

from milepost.engines.protocols import Generate
from milepost.router.client import HttpGenerate, open_client
from milepost.storage import text
from milepost.storage.journal import Slot, StepStore
from milepost.storage.parameters import RolloutSection
from milepost.storage.schema import ROLLOUTS, from_rows
from milepost.storage.tables import TableRef, read_table
from milepost.storage.tombstones import TOMBSTONE
from milepost.tasks.rollouts import RolloutFunction, RolloutParams, get_rollout
from milepost.tasks.sample import shard_of
from milepost.tasks.samples import Prompt, Sample, row, unasked


@dataclass(frozen=True)
class Shard:
    """One slice of a round: its number, how many there are, and the round."""

    index: int
    count: int
    round: int


@dataclass(frozen=True)
class Sampling:
    """How samples are drawn. `params` is SGLang's `sampling_params`, less the seed."""

    function: str
    params: dict[str, Any]
    n_samples_per_prompt: int
    context_length: int
    seed: int


def sampling_seed(seed: int, sample_id: str) -> int:
    """A seed in [0, 2**31) that depends on the run's seed and the sample alone, never on order or batch."""
    digest = hashlib.sha256(f"{seed}/{sample_id}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def sampling_params(rollout: RolloutSection) -> dict[str, Any]:
    """SGLang's `sampling_params` for a rollout section."""
    params: dict[str, Any] = {
        "temperature": rollout.temperature,
        "top_p": rollout.top_p,
        "top_k": rollout.top_k,
        "max_new_tokens": rollout.max_new_tokens,
    }
    return params | ({"stop": rollout.stop} if rollout.stop else {})


def prompts_of(table: pa.Table) -> list[Prompt]:
    return [
        Prompt(
            prompt_id=item["prompt_id"],
            group_id=item["group_id"],
            dataset=item["dataset"],
            content=text.from_json(item["prompt"]),
            token_ids=item["prompt_token_ids"],
            label=text.from_json(item["label"]),
            metadata=text.from_json(item["metadata"]),
        )
        for item in table.to_pylist()
    ]


async def sample_rows(
    generate: Generate, function: RolloutFunction, prompt: Prompt, index: int, *, sampling: Sampling
) -> list[dict[str, Any]]:
    """The rows of sample `index` of a group. A function that returns several samples gives each its own id."""
    sample_id = f"{prompt.group_id}-{index:03d}"
    seed = sampling_seed(sampling.seed, sample_id)
    if prompt.content == TOMBSTONE:
        return [unasked(prompt, sample_id=sample_id, seed=seed, sampling=sampling.params)]
    params = RolloutParams(sample_id, sampling.params | {"sampling_seed": seed}, sampling.context_length)
    found = await function(generate, prompt, params)
    samples: list[Sample] = found if isinstance(found, list) else [found]
    ids = [sample_id] if len(samples) == 1 else [f"{sample_id}.{part}" for part in range(len(samples))]
    return [
        row(prompt, sample, sample_id=name, seed=seed, sampling=sampling.params)
        for name, sample in zip(ids, samples, strict=True)
    ]


async def generate_rows(
    generate: Generate, prompts: list[Prompt], sampling: Sampling, *, concurrency: int
) -> list[dict[str, Any]]:
    """The rows of every sample of `prompts`, in order. The first failure cancels the rest and is raised."""
    function = get_rollout(sampling.function)
    gate = asyncio.Semaphore(concurrency)

    async def one(prompt: Prompt, index: int) -> list[dict[str, Any]]:
        async with gate:
            return await sample_rows(generate, function, prompt, index, sampling=sampling)

    async with asyncio.TaskGroup() as group:
        running = [
            group.create_task(one(prompt, index))
            for prompt in prompts
            for index in range(sampling.n_samples_per_prompt)
        ]
    return [found for done in running for found in done.result()]


async def generate_table(
    prompts: list[Prompt], sampling: Sampling, rollout: RolloutSection, *, router_url: str, place: dict[str, Any]
) -> pa.Table:
    """Samples for `prompts` as a rollouts table; `place` holds run_id, step and shard."""
    async with open_client(rollout.concurrency) as client:
        generate = HttpGenerate(router_url, client, timeout_seconds=rollout.timeout_seconds)
        rows = await generate_rows(generate, prompts, sampling, concurrency=rollout.concurrency)
    return from_rows([place | found for found in rows], ROLLOUTS)


@task(task_run_name="generate-{shard.round}.{shard.index}", cache_policy=NO_CACHE)
async def generate_rollouts(
    prompts: TableRef,
    shard: Shard,
    sampling: Sampling,
    rollout: RolloutSection,
    *,
    weight_version: str,
    router_url: str,
    store: StepStore,
) -> TableRef:
    """Samples for every prompt of the shard, as rows of the rollouts table."""
    started = time.monotonic()
    slot = Slot("generate", shard.round, shard.index)
    config = asdict(sampling) | {"shards": shard.count, "weight_version": weight_version}
    key = store.key(slot, [prompts], config)
    commit = store.committed(slot, key)
    if commit is None:
        chosen = prompts_of(shard_of(read_table(prompts), shard.index, shard.count))
        place = {"run_id": store.run_id, "step": store.step, "shard": shard.index}
        table = await generate_table(chosen, sampling, rollout, router_url=router_url, place=place)
        commit = store.commit(slot, key, {"rollouts": store.write(str(slot), table, ROLLOUTS)}, started=started)
    return commit.tables["rollouts"]
