"""Supervised fine-tuning, through the same train engine and tables as reinforcement learning."""

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from milepost.engines.protocols import UpdateParams, UpdateResult, WeightSource
from milepost.flows.trainer_alone import trainer_alone
from milepost.storage import files
from milepost.storage.messages import Messages
from milepost.storage.parameters import Parameters
from milepost.storage.prompt_rows import prompt_id
from milepost.storage.provenance import provenance
from milepost.storage.runs import RunFolder
from milepost.storage.schema import ROLLOUTS, from_rows
from milepost.storage.tables import TableRef, write_table
from milepost.storage.taught import ROW, SFT_RECORD
from milepost.storage.text import escape, to_json


@dataclass(frozen=True)
class Example:
    """A prompt and its response, whose tokens are trained: all, or those that `loss_mask` has a 1 for.

    `row` is its row in the file that it is from, if it is from one.
    """

    prompt: str | Messages
    prompt_token_ids: list[int]
    response: str
    response_token_ids: list[int]
    loss_mask: list[int] | None = None
    row: int | None = None

    @property
    def tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.response_token_ids)


@dataclass(frozen=True)
class SftPlan:
    """At most `steps` optimizer steps on `batch_size` examples each, drawn by `seed` without repetition in an epoch.

    Training stops early when the running mean of the loss is below `target_loss`. The last batches are smaller where
    only so many `examples` are to be drawn in all.
    """

    steps: int
    batch_size: int
    seed: int
    target_loss: float = 0.0
    examples: int | None = None


@dataclass(frozen=True)
class FineTuned:
    """The weights that were exported, and the loss of every step."""

    source: WeightSource
    losses: list[float]


class Learnt(Protocol):
    """Called when a step has learnt its batch, which `started` at this `time.monotonic()`."""

    def __call__(self, step: int, batch: TableRef, result: UpdateResult, *, started: float) -> None: ...


@dataclass
class _Course:
    """What came of each step so far."""

    losses: list[float] = field(default_factory=list)
    batches: list[str] = field(default_factory=list)
    mean: float = 0.0

    def add(self, loss: float, batch: str) -> None:
        """`mean` is exponential: each new loss weighs a tenth."""
        self.mean = 0.9 * self.mean + 0.1 * loss if self.losses else loss
        self.losses.append(loss)
        self.batches.append(batch)


def example_row(example: Example, *, run: str, step: int, position: int) -> dict[str, object]:
    """An example as a sample that nobody sampled: log-probabilities are zero and never read."""
    count = len(example.response_token_ids)
    response, escaped = escape(example.response)
    name = f"{step:06d}-{position:05d}"
    return {
        "run_id": run,
        "step": step,
        "shard": 0,
        "group_id": name,
        "sample_id": name,
        "prompt_id": prompt_id(example.prompt, None, {}),
        "dataset": "sft",
        "prompt": to_json(example.prompt),
        "prompt_token_ids": example.prompt_token_ids,
        "label": "null",
        "response": response,
        "response_escaped": escaped,
        "response_token_ids": example.response_token_ids,
        "loss_mask": [1] * count if example.loss_mask is None else example.loss_mask,
        "rollout_logprobs": [0.0] * count,
        "finish_reason": "stop",
        "status": "completed",
        "turns": 1,
        "seed": 0,
        "sampling": "{}",
        "metadata": to_json({} if example.row is None else {ROW: example.row}),
        "kept": True,
        "advantages": [1.0] * count,
        "old_logprobs": [0.0] * count,
    }


def draw(examples: Sequence[Example], plan: SftPlan) -> list[list[Example]]:
    """The batches of the plan: epoch after epoch, each in an order of its own."""
    generator = random.Random(plan.seed)
    wanted = min(plan.steps * plan.batch_size, plan.examples or plan.steps * plan.batch_size)
    order: list[Example] = []
    while len(order) < wanted:
        epoch = list(examples)
        generator.shuffle(epoch)
        order += epoch
    order = order[:wanted]
    return [order[start : start + plan.batch_size] for start in range(0, wanted, plan.batch_size)]


async def fine_tune(
    run: str,
    folder: str,
    examples: Sequence[Example],
    plan: SftPlan,
    *,
    parameters: Parameters,
    model_dir: str,
    advance: Callable[[str], None],
    data: Mapping[str, Any] | None = None,
    learnt: Learnt | None = None,
    waiting: AbstractContextManager[None] = nullcontext(),
) -> FineTuned:
    """Train on `examples` and export the weights to `folder/model`; the Ray cluster must be joined.

    What they come from is in `folder/sft.json`, for the lineage of whatever begins with them; `data` says there where
    the examples are from. Each batch is in the folder of its step, and `learnt` is told of it. Inside of `waiting` it
    is not yet its turn on the engines. RuntimeError when loss or gradient is not finite.
    """
    course = _Course()
    async with trainer_alone(run, parameters, model_dir, waiting=waiting) as trainer:
        for step, batch in enumerate(draw(examples, plan)):
            started = time.monotonic()
            rows = [example_row(item, run=run, step=step, position=at) for at, item in enumerate(batch)]
            place = files.join(RunFolder(folder, run).step(step), "batch")
            ref = await asyncio.to_thread(write_table, place, from_rows(rows, ROLLOUTS), ROLLOUTS)
            update = UpdateParams("sft", {"aggregation": "token_mean"})
            result = await asyncio.to_thread(trainer.step, ref, update, f"sft-{step:06d}")
            if not result.applied:
                raise RuntimeError(f"loss or gradient of step {step} is not finite: lower optimizer.lr")
            course.add(result.metrics["loss"], ref.digest)
            if learnt is not None:
                await asyncio.to_thread(learnt, step, ref, result, started=started)
            advance(f"loss {course.mean:.3f}")
            if course.mean < plan.target_loss:
                break
        source = await asyncio.to_thread(trainer.weights, files.join(folder, "model"), 0)
    record = {
        "model": model_dir,
        "data": dict(data or {}),
        "steps": len(course.losses),
        "plan": asdict(plan),
        "loss": course.mean,
        "losses": course.losses,
        "batches": course.batches,
        "version": str(source.version),
        "commit": provenance().commit,
    }
    files.publish_json(files.join(folder, SFT_RECORD), record, overwrite=True)
    return FineTuned(source, course.losses)
