"""Supervised fine-tuning on solved problems, through the same train engine and tables as reinforcement learning."""

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from milepost.engines.fleet import create_trainer
from milepost.engines.protocols import UpdateParams, WeightSource
from milepost.storage import files
from milepost.storage.begun import SFT_RECORD
from milepost.storage.parameters import Parameters
from milepost.storage.provenance import provenance
from milepost.storage.schema import ROLLOUTS, from_rows
from milepost.storage.tables import write_table


@dataclass(frozen=True)
class Example:
    """One solved problem: only the response's tokens are trained."""

    prompt: str
    prompt_token_ids: list[int]
    response: str
    response_token_ids: list[int]


@dataclass(frozen=True)
class SftPlan:
    """At most `steps` optimizer steps on `batch_size` examples each, drawn by `seed` without repetition in an epoch.

    Training stops early when the running mean of the loss is below `target_loss`.
    """

    steps: int
    batch_size: int
    seed: int
    target_loss: float = 0.0


def example_row(example: Example, *, run: str, step: int, position: int) -> dict[str, object]:
    """An example as a sample that nobody sampled: log-probabilities are zero and never read."""
    count = len(example.response_token_ids)
    name = f"{step:06d}-{position:05d}"
    return {
        "run_id": run,
        "step": step,
        "shard": 0,
        "group_id": name,
        "sample_id": name,
        "prompt_id": files.digest_of(example.prompt.encode())[:32],
        "dataset": "sft",
        "prompt": files.canonical_json(example.prompt),
        "prompt_token_ids": example.prompt_token_ids,
        "label": "null",
        "response": example.response,
        "response_escaped": False,
        "response_token_ids": example.response_token_ids,
        "loss_mask": [1] * count,
        "rollout_logprobs": [0.0] * count,
        "finish_reason": "stop",
        "status": "completed",
        "turns": 1,
        "seed": 0,
        "sampling": "{}",
        "metadata": "{}",
        "kept": True,
        "advantages": [1.0] * count,
        "old_logprobs": [0.0] * count,
    }


def draw(examples: Sequence[Example], plan: SftPlan) -> list[list[Example]]:
    """The batches of the plan: epoch after epoch, each in an order of its own."""
    generator = random.Random(plan.seed)
    wanted = plan.steps * plan.batch_size
    order: list[Example] = []
    while len(order) < wanted:
        epoch = list(examples)
        generator.shuffle(epoch)
        order += epoch
    return [order[start : start + plan.batch_size] for start in range(0, wanted, plan.batch_size)]


def running_mean(mean: float | None, value: float) -> float:
    """The exponential mean of the values so far, each new one weighing a tenth."""
    return value if mean is None else 0.9 * mean + 0.1 * value


def fine_tune(
    run: str,
    folder: str,
    examples: Sequence[Example],
    plan: SftPlan,
    *,
    parameters: Parameters,
    model_dir: str,
    advance: Callable[[str], None],
) -> WeightSource:
    """Train on `examples` and export the weights to `folder/model`; the Ray cluster must be joined.

    What they come from is in `folder/sft.json`, for the lineage of whatever begins with them.
    """
    trainer = create_trainer(run, parameters, model_dir)
    trainer.load()
    loss: float | None = None
    batches: list[str] = []
    try:
        for step, batch in enumerate(draw(examples, plan)):
            rows = [example_row(item, run=run, step=step, position=at) for at, item in enumerate(batch)]
            ref = write_table(files.join(folder, "batches", f"{step:06d}"), from_rows(rows, ROLLOUTS), ROLLOUTS)
            batches.append(ref.digest)
            result = trainer.step(ref, UpdateParams("sft", {"aggregation": "token_mean"}), f"sft-{step:06d}")
            loss = running_mean(loss, result.metrics["loss"])
            advance(f"loss {loss:.3f}")
            if loss < plan.target_loss:
                break
        source = trainer.weights(files.join(folder, "model"), 0)
        record = {"model": model_dir, "steps": len(batches), "plan": asdict(plan), "loss": loss, "batches": batches}
        record |= {"version": str(source.version), "commit": provenance().commit}
        files.publish_json(files.join(folder, SFT_RECORD), record, overwrite=True)
        return source
    finally:
        trainer.close()
