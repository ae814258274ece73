"""Every number that follows from the parameters of a run, by name, in the order people read them."""

import pyarrow.compute as pc

from milepost.engines import schedule
from milepost.engines.memory_plan import BYTES, engine_weights, trained_parameters, trainer_memory
from milepost.engines.model_layout import parameter_count
from milepost.flows.plan import RunPlan
from milepost.storage.batch_plan import critic_optimizer, optimizer_steps
from milepost.storage.carried import round_size
from milepost.storage.parameters import Parameters
from milepost.storage.parent import steps_before
from milepost.storage.prompt_mixture import counts
from milepost.storage.prompts import PromptSet
from milepost.storage.redaction import masked_text

GIB = 1024**3

Numbers = dict[str, str | int | float]


def describe(plan: RunPlan) -> Numbers:
    """Of the stages that the run makes; what it takes from another, and what it leaves out, is said instead."""
    course = plan.course
    return {
        "run": plan.run,
        "steps": plan.steps,
        "model": masked_text(plan.parameters.model.path),
        "parameters": parameter_count(plan.model_config),
        **(_parent(plan) if plan.parent else {}),
        **_prompts(plan),
        **_sizes(plan),
        **(_training(plan) if course.trains else {"trained": "nothing: engines.train is none"}),
        **(_rollout(plan) if course.makes("generate") else {"rollout engines": 0}),
    }


def _parent(plan: RunPlan) -> Numbers:
    assert plan.parent
    begin = plan.parent.begin
    return {
        f"taken from {plan.parent.run}": f"{', '.join(plan.course.taken)} of steps {begin} to {begin + plan.steps - 1}"
    }


def _prompts(plan: RunPlan) -> Numbers:
    prompts = plan.prompts
    return {
        "prompts": len(prompts),
        **_shares(prompts),
        "prompts set aside (too long)": prompts.too_long,
        "share set aside": round(prompts.too_long_share, 4),
        "prompts quarantined": prompts.bad_lines,
        "prompts repeated": prompts.duplicates,
        "longest prompt (tokens)": pc.max(pc.list_value_length(prompts.table["prompt_token_ids"])).as_py(),
    }


def _shares(prompts: PromptSet) -> Numbers:
    weights = sum(share.weight for share in prompts.shares)
    return {
        f"prompts of {share.name}": f"{share.rows}, {share.weight / weights:.1%} of every step"
        for share in prompts.shares
    }


def _epochs(plan: RunPlan) -> Numbers:
    """How often every prompt is served; in a mixture those of each set."""
    served = plan.steps * plan.batch.rollout_batch_size
    shares = plan.prompts.shares
    if not shares:
        return {"epochs": round(served / len(plan.prompts), 3)}
    return {
        f"epochs of {share.name}": round(count / share.rows, 3)
        for share, count in zip(shares, counts(served, shares), strict=True)
    }


def _sizes(plan: RunPlan) -> Numbers:
    batch, parameters = plan.batch, plan.parameters
    prompts = round_size(parameters, batch.rollout_batch_size) * parameters.filter.max_rounds
    asked = prompts * batch.n_samples_per_prompt
    knobs: Numbers = {
        "rollout_batch_size": batch.rollout_batch_size,
        "n_samples_per_prompt": batch.n_samples_per_prompt,
    }
    if plan.course.trains:
        knobs |= {
            "global_batch_size": batch.global_batch_size,
            "num_steps_per_rollout": batch.num_steps_per_rollout,
        }
    return knobs | {
        "samples a step": batch.samples_per_step,
        "response tokens a step (at most)": asked * parameters.rollout.max_new_tokens,
        **_epochs(plan),
        "shards a step": min(parameters.rollout.shards, batch.rollout_batch_size),
    }


def _training(plan: RunPlan) -> Numbers:
    parameters = plan.parameters
    count = trained_parameters(plan.model_config, parameters)
    state, memory = _state_bytes(parameters, count), trainer_memory(plan.model_config, parameters)
    return {
        "optimizer steps": optimizer_steps(parameters, steps_before(plan.parent) + plan.steps)
        - optimizer_steps(parameters, steps_before(plan.parent)),
        "learning rate": schedule.shown(parameters.optimizer),
        **(_critic(parameters) if parameters.algorithm.has_critic else {}),
        "trainer ranks": parameters.model.ranks,
        "trainer state (GiB, all ranks)": round(state / GIB, 3),
        "trainer memory on a GPU (GiB, about)": round(memory.total / GIB, 1),
        "logits on a GPU (GiB, with gradient)": round(memory.logits / GIB, 3),
        "checkpoint (GiB)": round((state - 4 * count) / GIB, 3),
    }


def _critic(parameters: Parameters) -> Numbers:
    alone = parameters.critic.pretrain_steps
    return {
        "critic": f"trained alone until step {alone}, then beside the policy" if alone else "trained beside the policy",
        "learning rate of the critic": schedule.shown(critic_optimizer(parameters)),
    }


def _rollout(plan: RunPlan) -> Numbers:
    return {
        "rollout engines": plan.parameters.engines.rollout_engines,
        "rollout engine weights on a GPU (GiB)": round(engine_weights(plan.model_config, plan.parameters) / GIB, 3),
    }


def _state_bytes(parameters: Parameters, count: int) -> int:
    """Weights, float32 gradients, float32 main weights where they differ, and Adam's two moments."""
    weights = BYTES[parameters.perf.dtype]
    main = 0 if parameters.perf.dtype == "float32" else 4
    return count * (weights + 4 + main + 8)
