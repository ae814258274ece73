"""What Prefect adds to a step: 50 steps on the fake engines as flows, against the same tasks as plain functions.

python tests/bench/bench_orchestration.py [STEPS]
"""

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from milepost.engines.fleet import Fleet, connect_fleet, fleet, joined_cluster
from milepost.engines.tiny_model import write_tiny_model
from milepost.engines.tokenizer import load_tokenizer, write_character_tokenizer
from milepost.flows import iteration as flow
from milepost.flows.data import arithmetic_problems, write_prompts
from milepost.flows.iteration import Collected, Improved, iteration
from milepost.flows.loop import recover
from milepost.flows.recipe import load_recipe
from milepost.flows.services import prefect_api
from milepost.flows.start import Launched, begin_run
from milepost.flows.step_context import Position, StepContext, open_step
from milepost.storage import runs
from milepost.storage.parameters import Parameters
from milepost.storage.tables import TableRef
from milepost.tasks.filter import Filtered, filter_rollouts
from milepost.tasks.generate import Shard, generate_rollouts
from milepost.tasks.optimize import optimize_policy
from milepost.tasks.sample import sample_prompts
from milepost.tasks.score import score_rollouts
from milepost.tasks.sync import sync_weights
from milepost.tasks.update import Update

Step = Callable[[str, str, int, Position], Awaitable[Position]]


async def plain_shard(prompts: TableRef, shard: Shard, context: StepContext) -> Filtered:
    parameters, store = context.parameters, context.store
    generated = await generate_rollouts.fn(
        prompts,
        shard,
        context.sampling,
        parameters.rollout,
        weight_version=str(context.version),
        router_url=context.fleet.router_url,
        store=store,
    )
    scored = await score_rollouts.fn(generated, shard, parameters.reward, run=store.run_id, store=store)
    return filter_rollouts.fn(scored, shard, parameters.filter, store=store)


async def plain_step(root: str, run: str, step: int, start: Position) -> Position:
    """`iteration` without Prefect: the same functions in the same order."""
    context = open_step(root, run, step, start.version)
    count = context.parameters.rollout.shards
    sampled = sample_prompts.fn(
        context.order, start.cursor, context.plan.rollout_batch_size, round_=0, store=context.store
    )
    filtered = await asyncio.gather(
        *(plain_shard(sampled.prompts, Shard(index, count, 0), context) for index in range(count))
    )
    collected = Collected([part.rollouts for part in filtered], sampled.cursor, train=True)
    optimized = await optimize_policy.fn(
        collected.shards,
        Update.of(context.parameters),
        weight_version=str(context.version),
        engine=context.fleet.trainer,
        store=context.store,
    )
    synced = await sync_weights.fn(
        step + 1,
        context.parameters.sync,
        save=False,
        folder=context.folder,
        trainer=context.fleet.trainer,
        engines=context.fleet.engines,
        router_url=context.fleet.router_url,
    )
    flow.close(context, collected, Improved(optimized, synced))
    return Position(collected.cursor, synced.version)


def fake_parameters(folder: Path) -> Parameters:
    model, prompts = folder / "model", folder / "prompts.jsonl"
    write_character_tokenizer(str(model), "0123456789+-*=")
    vocabulary = load_tokenizer(str(model)).vocab_size
    write_tiny_model(str(model), vocab_size=vocabulary, hidden=32, layers=2, heads=4, kv_heads=2, seed=0)
    rows = [
        {"prompt": item.prompt, "label": item.label, "metadata": {}}
        for item in arithmetic_problems(64, 0, held_out=0)[0]
    ]
    write_prompts(rows, str(prompts))
    overrides = [
        f"model.path={model}",
        f"data.path={prompts}",
        "data.rollout_batch_size=16",
        "data.n_samples_per_prompt=4",
        "data.apply_chat_template=false",
        "algorithm.num_steps_per_rollout=1",
        "rollout.shards=4",
        "rollout.max_new_tokens=8",
        "model.context_length=32",
        "reward.name=exact",
        "engines.train=fake",
        "engines.rollout=fake",
        "tracking.enabled=false",
    ]
    return load_recipe(None, overrides)[0]


async def timed(launched: Launched, engines: Fleet, root: str, steps: int, one: Step) -> list[float]:
    begin, position = await recover(launched, engines)
    seconds = []
    for step in range(begin, steps):
        begun = time.perf_counter()
        position = await one(root, launched.folder.run_id, step, position)
        seconds.append(time.perf_counter() - begun)
    return seconds


def measure(name: str, root: str, steps: int, parameters: Parameters, one: Step) -> float:
    launched = begin_run(root, runs.run_folder(root, name), steps, parameters, fence=0)
    with fleet(name, parameters, parameters.model.path):
        seconds = asyncio.run(timed(launched, connect_fleet(name, parameters), root, steps, one))
    return statistics.median(seconds)


def main(steps: int) -> None:
    with tempfile.TemporaryDirectory() as folder, joined_cluster(None):
        parameters = fake_parameters(Path(folder))
        plain = measure("plain", folder, steps, parameters, plain_step)
        with prefect_api(say=lambda text: None, console_level="CRITICAL"):
            prefect = measure("prefect", folder, steps, parameters, iteration)
    print(f"{steps} steps of 4 shards, median: plain {plain * 1e3:.0f} ms, with Prefect {prefect * 1e3:.0f} ms")
    print(f"Prefect adds {(prefect - plain) * 1e3:.0f} ms a step; ratio {prefect / plain:.2f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 50)
