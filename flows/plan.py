"""What a run would be, worked out and checked without starting anything: `train` refuses what this refuses."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from milepost.engines.loss_params import check_loss
from milepost.engines.model_layout import check_layout
from milepost.engines.model_source import resolve_model
from milepost.engines.schedule import check_rates
from milepost.engines.sglang_flags import check_sglang
from milepost.flows.algorithm_checks import check_algorithm
from milepost.flows.engine_checks import check_engines, check_gpus, has_gpus
from milepost.flows.off_policy_checks import check_off_policy
from milepost.flows.other_models import check_others, other_models
from milepost.flows.parents import adopted, check_source, open_source, stored_rollouts
from milepost.flows.planned_prompts import load_eval_prompts, load_planned
from milepost.flows.service_state import state_folder
from milepost.router.policies import get_policy
from milepost.storage.batch_plan import BatchPlan, batch_plan, with_decay_steps
from milepost.storage.carried import round_size
from milepost.storage.eval_sets import eval_sets
from milepost.storage.parameters import DataSet, Parameters, RewardSection
from milepost.storage.parent import ParentRun, course, steps_before
from milepost.storage.prompts import PromptSet
from milepost.storage.runs import run_folder
from milepost.storage.stages import Course
from milepost.tasks.advantages import get_advantage
from milepost.tasks.filters import get_filter, get_sample_filter
from milepost.tasks.prompt_reward import chosen
from milepost.tasks.rewards import check_reward
from milepost.tasks.rollouts import get_rollout
from milepost.tasks.tools import check_tools
from milepost.tasks.update import update_params
from milepost.tasks.watched import check_watched

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
    eval_prompts: pa.Table | None
    parent: ParentRun | None = None
    others: Mapping[str, str] = field(default_factory=dict)
    """The folders of its other models, see other_models."""

    @property
    def course(self) -> Course:
        return course(self.parameters, self.parent)


def check_steps(steps: int) -> None:
    if steps < 1:
        raise ValueError(f"steps is {steps}, it must be at least 1")


def check_size(parameters: Parameters) -> None:
    size = len(parameters.model_dump_json())
    if size > PARAMETER_BYTES:
        raise ValueError(f"the parameters take {size} bytes and may take {PARAMETER_BYTES}: put long values into files")


def check_names(parameters: Parameters, course: Course) -> None:
    """LookupError or ValueError for a rollout function, reward, filter, advantage or loss that cannot be used."""
    if course.makes("generate"):
        get_policy(parameters.engines.router_policy)
        get_rollout(parameters.rollout.function)
        check_tools(parameters.rollout)
    if course.makes("score"):
        for part in chosen(parameters.reward).parts:
            check_reward(part.name, part.options)
        for data in parameters.data.sets:
            _check_own_reward(data, parameters.reward)
    for item in eval_sets(parameters.eval):
        if item.reward:
            check_reward(item.reward, item.reward_options)
    if course.makes("filter"):
        get_filter(parameters.filter.group, parameters.filter.options)
        get_sample_filter(parameters.filter.sample)
    if course.trains:
        get_advantage(parameters.algorithm.advantage)
        update = update_params(parameters)
        check_loss(update.loss, update.params)


def _check_own_reward(data: DataSet, reward: RewardSection) -> None:
    """That of one of several prompt sets."""
    if data.reward and not reward.by_prompt:
        raise ValueError(
            f"data.sets has {data.path!r} with reward {data.reward!r}, and reward.by_prompt is off: set it to true"
        )
    if data.reward:
        check_reward(data.reward, {})


def check_lengths(parameters: Parameters) -> None:
    if parameters.rollout.max_new_tokens >= parameters.model.context_length:
        raise ValueError(
            f"rollout.max_new_tokens {parameters.rollout.max_new_tokens} leaves no room for a prompt in "
            f"model.context_length {parameters.model.context_length}: lower one or raise the other"
        )


def check_collection(parameters: Parameters, batch: BatchPlan) -> None:
    """ValueError for rounds of fewer prompts than a step trains on, and for samples that cannot be gone on with."""
    function = parameters.rollout.function
    if parameters.rollout.partial and function != "single_turn":
        raise ValueError(
            f"rollout.partial goes on with one completion, and rollout.function is {function!r}: "
            "set rollout.partial=false or rollout.function=single_turn"
        )
    size = round_size(parameters, batch.rollout_batch_size)
    if size < batch.rollout_batch_size:
        raise ValueError(
            f"rollout.over_sampling_batch_size {size} is less than data.rollout_batch_size "
            f"{batch.rollout_batch_size}: give more, or leave it out"
        )


def _require(value: str, key: str, example: str) -> str:
    if not value:
        raise ValueError(f"{key} is not set, give it as --set {key}={example} or in the recipe")
    return value


def model_folder(path: str) -> str:
    """The Hugging Face folder of a model, made under the state folder when it is a GGUF file."""
    return resolve_model(path, str(state_folder() / "models"))


def make_plan(
    run: str,
    root: str,
    steps: int,
    parameters: Parameters,
    *,
    parent: ParentRun | None = None,
    quarantine_uri: str | None = None,
) -> RunPlan:
    """Check everything that can be checked before processes start; cheap checks come first.

    A run with a `parent`, or with `data.rollouts`, has from there what was decided there. Malformed lines are written
    to `quarantine_uri` when the policy is to quarantine; without it they are only counted.
    """
    run_folder(root, run)
    check_steps(steps)
    parent = parent or stored_rollouts(parameters)
    source = open_source(parent, root, run, steps) if parent else None
    stages = course(parameters, parent)
    if source:
        parameters = adopted(parameters, source.parameters, source.parent.run, stages.taken)
    parameters = with_decay_steps(parameters, steps_before(parent) + steps)
    given, parameters = parameters, parameters.resolved(going_on=source is not None)
    check_size(parameters)
    batch = batch_plan(parameters)
    if stages.trains:
        check_rates(parameters)
    check_collection(parameters, batch)
    check_algorithm(parameters, batch, stages)
    check_names(parameters, stages)
    check_off_policy(parameters, generates=stages.makes("generate"))
    if stages.makes("generate") or parameters.eval.every_steps:
        check_lengths(parameters)
    check_watched(parameters)
    check_engines(parameters, stages)
    if parameters.engines.rollout == "sglang":
        check_sglang(parameters)
    model_path = _require(parameters.model.path, "model.path", "FOLDER")
    if not source and not parameters.data.sets:
        _require(parameters.data.path, "data.path", "prompts.jsonl")
    model_dir = source.model_folder(model_path) if source else ""
    model_dir = model_dir or model_folder(model_path)
    config = json.loads(Path(model_dir, "config.json").read_text())
    check_layout(config, parameters.model)
    others = other_models(parameters) if stages.trains else {}
    check_others(parameters, others, model_dir)
    check_gpus(config, parameters)
    check_context(config, parameters)
    if source:
        check_source(source, parameters, model_dir)
        prompts = source.prompts
    else:
        reward = parameters.reward if stages.makes("score") else None
        prompts = load_planned(parameters.data, parameters, model_dir, reward=reward, quarantine=quarantine_uri)
    return RunPlan(
        run=run,
        root=root,
        steps=steps,
        parameters=given,
        batch=batch,
        model_dir=model_dir,
        model_config=config,
        prompts=prompts,
        eval_prompts=load_eval_prompts(parameters, model_dir),
        parent=parent,
        others=others,
    )


def check_context(config: dict[str, Any], parameters: Parameters) -> None:
    """ValueError for a context that is longer than the model's."""
    longest = config.get("max_position_embeddings", parameters.model.context_length)
    if parameters.model.context_length > longest:
        raise ValueError(
            f"model.context_length {parameters.model.context_length} is more than the model's {longest} positions: "
            f"set it to {longest} or less"
        )


def _longest(parameters: Parameters) -> str:
    """The parameter that limits prompts."""
    most = parameters.data.max_prompt_tokens
    if most is not None and most < parameters.model.context_length:
        return f"data.max_prompt_tokens {most}"
    return f"model.context_length {parameters.model.context_length}"


def notices(plan: RunPlan) -> list[str]:
    """What is not as one might expect, in sentences: prompts that are left out, GPUs that are not there."""
    prompts, found = plan.prompts, []
    if plan.parent and (plan.parameters.data.path or plan.parameters.data.sets):
        given = "data.path" if plan.parameters.data.path else "data.sets"
        found.append(f"{given} is not read: the prompts are those that run {plan.parent.run!r} has stored")
    if prompts.too_long:
        found.append(
            f"{prompts.too_long} prompts ({prompts.too_long_share:.1%}) do not fit {_longest(plan.parameters)} and are "
            "set aside"
        )
    if prompts.bad_lines:
        found.append(f"{prompts.bad_lines} malformed lines are quarantined")
    if prompts.duplicates:
        found.append(f"{prompts.duplicates} prompts repeat an earlier one")
    if plan.parameters.perf.colocate and not has_gpus():
        found.append("perf.colocate shares no GPU, because this machine has none: `milepost doctor` says why")
    return found
