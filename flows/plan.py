"""What a run would be, worked out and checked without starting anything: `train` refuses what this refuses."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from milepost.engines.loss_params import check_loss
from milepost.engines.memory_plan import BYTES, engine_weights, trainer_memory
from milepost.engines.model_layout import check_layout, parameter_count
from milepost.engines.model_source import resolve_model
from milepost.engines.sglang_flags import check_sglang
from milepost.engines.tokenizer import load_tokenizer
from milepost.flows.engine_checks import check_engines, check_gpus, has_gpus
from milepost.flows.service_state import state_folder
from milepost.storage.batch_plan import BatchPlan, batch_plan
from milepost.storage.parameters import Parameters
from milepost.storage.prompts import PromptSet, load_prompts
from milepost.storage.runs import run_folder
from milepost.tasks.advantages import get_advantage
from milepost.tasks.filters import get_filter
from milepost.tasks.rewards import check_reward
from milepost.tasks.rollouts import get_rollout

GIB = 1024**3
PARAMETER_BYTES = 500_000  # a Prefect server refuses a flow run whose parameters take more than 512 KiB


@dataclass(frozen=True)
class RunPlan:
    """A run that can start: every name resolved, every path read."""

    run: str
    root: str
    steps: int
    parameters: Parameters
    batch: BatchPlan
    model_dir: str
    model_config: dict[str, Any]
    prompts: PromptSet
    eval_prompts: PromptSet | None


def check_steps(steps: int) -> None:
    if steps < 1:
        raise ValueError(f"steps is {steps}, it must be at least 1")


def check_size(parameters: Parameters) -> None:
    size = len(parameters.model_dump_json())
    if size > PARAMETER_BYTES:
        raise ValueError(f"the parameters take {size} bytes and may take {PARAMETER_BYTES}: put long values into files")


def check_names(parameters: Parameters) -> None:
    """LookupError or ValueError for a rollout function, reward, filter, advantage or loss that cannot be used."""
    get_rollout(parameters.rollout.function)
    check_reward(parameters.reward.name, parameters.reward.options)
    get_filter(parameters.filter.group)
    get_advantage(parameters.algorithm.advantage)
    check_loss(parameters.algorithm.loss)


def check_lengths(parameters: Parameters) -> None:
    if parameters.rollout.max_new_tokens >= parameters.model.context_length:
        raise ValueError(
            f"rollout.max_new_tokens {parameters.rollout.max_new_tokens} leaves no room for a prompt in "
            f"model.context_length {parameters.model.context_length}: lower one or raise the other"
        )


def _require(value: str, key: str, example: str) -> str:
    if not value:
        raise ValueError(f"{key} is not set, give it as --set {key}={example} or in the recipe")
    return value


def model_folder(path: str) -> str:
    """The Hugging Face folder of a model, made under the state folder when it is a GGUF file."""
    return resolve_model(path, str(state_folder() / "models"))


def make_plan(run: str, root: str, steps: int, parameters: Parameters, *, quarantine_uri: str | None = None) -> RunPlan:
    """Check everything that can be checked before processes start; cheap checks come first.

    Malformed lines are written to `quarantine_uri` when the policy is to quarantine; without it they are only counted.
    """
    run_folder(root, run)
    check_steps(steps)
    check_size(parameters)
    batch = batch_plan(parameters)
    check_names(parameters)
    check_lengths(parameters)
    check_engines(parameters)
    if parameters.engines.rollout == "sglang":
        check_sglang(parameters)
    model_path = _require(parameters.model.path, "model.path", "FOLDER")
    data_path = _require(parameters.data.path, "data.path", "prompts.jsonl")
    model_dir = model_folder(model_path)
    config = json.loads(Path(model_dir, "config.json").read_text())
    check_layout(config, parameters.model)
    check_gpus(config, parameters)
    _check_context(config, parameters)
    return RunPlan(
        run=run,
        root=root,
        steps=steps,
        parameters=parameters,
        batch=batch,
        model_dir=model_dir,
        model_config=config,
        prompts=_load(parameters, data_path, model_dir, quarantine=quarantine_uri),
        eval_prompts=load_eval_prompts(parameters, model_dir),
    )


def _check_context(config: dict[str, Any], parameters: Parameters) -> None:
    longest = config.get("max_position_embeddings", parameters.model.context_length)
    if parameters.model.context_length > longest:
        raise ValueError(
            f"model.context_length {parameters.model.context_length} is more than the model's {longest} positions: "
            f"set it to {longest} or less"
        )


def _load(parameters: Parameters, path: str, model_dir: str, *, quarantine: str | None) -> PromptSet:
    tokenizer = load_tokenizer(model_dir, trust_remote_code=parameters.model.trust_remote_code)
    data = parameters.data.model_copy(update={"path": path})
    room = parameters.model.context_length
    return load_prompts(data, tokenizer, context_length=room, quarantine_uri=quarantine)


def load_eval_prompts(parameters: Parameters, model_dir: str) -> PromptSet | None:
    """The prompt set of `eval`; None when nothing is to be evaluated."""
    if not parameters.eval.path or not parameters.eval.every_steps:
        return None
    return _load(parameters, parameters.eval.path, model_dir, quarantine=None)


def notices(plan: RunPlan) -> list[str]:
    """What is not as one might expect, in sentences: prompts that are left out, GPUs that are not there."""
    prompts, found = plan.prompts, []
    if prompts.too_long:
        found.append(
            f"{prompts.too_long} prompts ({prompts.too_long_share:.1%}) do not fit model.context_length "
            f"{plan.parameters.model.context_length} and are set aside"
        )
    if prompts.bad_lines:
        found.append(f"{prompts.bad_lines} malformed lines are quarantined")
    if prompts.duplicates:
        found.append(f"{prompts.duplicates} prompts repeat an earlier one")
    if plan.parameters.perf.colocate and not has_gpus():
        found.append("perf.colocate shares no GPU, because this machine has none: `milepost doctor` says why")
    return found


def _state_bytes(parameters: Parameters, count: int) -> int:
    """Weights, float32 gradients, float32 main weights where they differ, and Adam's two moments."""
    weights = BYTES[parameters.perf.dtype]
    main = 0 if parameters.perf.dtype == "float32" else 4
    return count * (weights + 4 + main + 8)


def describe(plan: RunPlan) -> dict[str, str | int | float]:
    """Every number that follows from the parameters, by name, in the order people read them."""
    parameters, batch = plan.parameters, plan.batch
    count = parameter_count(plan.model_config)
    state = _state_bytes(parameters, count)
    world = parameters.model.tensor_parallel * parameters.model.pipeline_parallel * parameters.model.data_parallel
    lengths = [len(prompt) for prompt in plan.prompts.table["prompt_token_ids"].to_pylist()]
    response = batch.samples_per_step * parameters.rollout.max_new_tokens
    return {
        "run": plan.run,
        "steps": plan.steps,
        "model": parameters.model.path,
        "parameters": count,
        "prompts": len(lengths),
        "prompts set aside (too long)": plan.prompts.too_long,
        "share set aside": round(plan.prompts.too_long_share, 4),
        "prompts quarantined": plan.prompts.bad_lines,
        "prompts repeated": plan.prompts.duplicates,
        "longest prompt (tokens)": max(lengths),
        "rollout_batch_size": batch.rollout_batch_size,
        "n_samples_per_prompt": batch.n_samples_per_prompt,
        "global_batch_size": batch.global_batch_size,
        "num_steps_per_rollout": batch.num_steps_per_rollout,
        "samples a step": batch.samples_per_step,
        "response tokens a step (at most)": response,
        "optimizer steps": plan.steps * batch.num_steps_per_rollout,
        "epochs": round(plan.steps * batch.rollout_batch_size / len(lengths), 3),
        "shards a step": min(parameters.rollout.shards, batch.rollout_batch_size),
        "trainer ranks": world,
        "rollout engines": parameters.engines.rollout_engines,
        "trainer state (GiB, all ranks)": round(state / GIB, 3),
        "trainer memory on a GPU (GiB, about)": round(trainer_memory(plan.model_config, parameters).total / GIB, 1),
        "logits of a micro-batch (GiB, float32)": round(_logits_bytes(plan) / GIB, 3),
        "rollout engine weights on a GPU (GiB)": round(engine_weights(plan.model_config, parameters) / GIB, 3),
        "checkpoint (GiB)": round((state - 4 * count) / GIB, 3),
    }


def _logits_bytes(plan: RunPlan) -> int:
    vocabulary = int(plan.model_config["vocab_size"]) // plan.parameters.model.tensor_parallel
    return 4 * vocabulary * plan.parameters.perf.max_tokens_per_micro_batch
