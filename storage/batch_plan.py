"""The four knobs: prompts a step, samples a prompt, samples an optimizer step, optimizer steps a step.

`rollout_batch_size * n_samples_per_prompt == global_batch_size * num_steps_per_rollout`, exactly: no tail is trimmed.
"""

from dataclasses import asdict, dataclass

from milepost.storage.parameters import Parameters
from milepost.storage.training import OptimizerSection


@dataclass(frozen=True)
class BatchPlan:
    """Four numbers for which the invariant holds; build it with `solve`."""

    rollout_batch_size: int
    n_samples_per_prompt: int
    global_batch_size: int
    num_steps_per_rollout: int

    @property
    def samples_per_step(self) -> int:
        return self.rollout_batch_size * self.n_samples_per_prompt


_PARTNER = {
    "rollout_batch_size": "n_samples_per_prompt",
    "n_samples_per_prompt": "rollout_batch_size",
    "global_batch_size": "num_steps_per_rollout",
    "num_steps_per_rollout": "global_batch_size",
}
_SAMPLES = ("rollout_batch_size", "n_samples_per_prompt")


def solve(
    rollout_batch_size: int | None = None,
    n_samples_per_prompt: int | None = None,
    global_batch_size: int | None = None,
    num_steps_per_rollout: int | None = None,
) -> BatchPlan:
    """The plan that any three of the numbers give; four are checked. ValueError names the numbers that do not fit."""
    knobs = {
        "rollout_batch_size": rollout_batch_size,
        "n_samples_per_prompt": n_samples_per_prompt,
        "global_batch_size": global_batch_size,
        "num_steps_per_rollout": num_steps_per_rollout,
    }
    for name, value in knobs.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{name} is {value!r}, it must be a whole number of at least 1")
    given = {name: value for name, value in knobs.items() if value is not None}
    absent = [name for name in knobs if name not in given]
    if len(absent) > 1:
        raise ValueError(f"{' and '.join(absent)} are not set, give at least three of the four batch sizes")
    if absent:
        given[absent[0]] = _fourth(absent[0], given)
    plan = BatchPlan(**given)
    _require_equal(plan)
    return plan


def _fourth(absent: str, given: dict[str, int]) -> int:
    other_side = [name for name in given if (name in _SAMPLES) != (absent in _SAMPLES)]
    product = given[other_side[0]] * given[other_side[1]]
    partner = _PARTNER[absent]
    quotient, rest = divmod(product, given[partner])
    if rest or quotient == 0:
        raise ValueError(
            f"{absent} cannot be solved: {other_side[0]} * {other_side[1]} = {product} is not a multiple of "
            f"{partner} = {given[partner]}"
        )
    return quotient


def _require_equal(plan: BatchPlan) -> None:
    left, right = plan.samples_per_step, plan.global_batch_size * plan.num_steps_per_rollout
    if left != right:
        numbers = asdict(plan)
        raise ValueError(
            "the batch sizes do not fit: rollout_batch_size {rollout_batch_size} * n_samples_per_prompt "
            "{n_samples_per_prompt} = {left}, but global_batch_size {global_batch_size} * num_steps_per_rollout "
            "{num_steps_per_rollout} = {right}; leave one of the four out and it is solved for you".format(
                **numbers, left=left, right=right
            )
        )


def with_decay_steps(parameters: Parameters, steps: int) -> Parameters:
    """Those of a run whose trainer takes so many steps, with the optimizer step at which its learning rate ends."""
    if parameters.engines.train == "none" or not parameters.optimizer.is_open:
        return parameters
    end = max(1, optimizer_steps(parameters, steps))
    return parameters.model_copy(update={"optimizer": parameters.optimizer.ending_at(end)})


def optimizer_steps(parameters: Parameters, steps: int) -> int:
    """How many the policy takes in the first so many steps of its trainer."""
    return max(0, steps * batch_plan(parameters).num_steps_per_rollout - _pretraining(parameters))


def critic_optimizer(parameters: Parameters) -> OptimizerSection:
    """The critic's: as the policy's, with a peak and a warm-up of its own, falling as far and ending with it."""
    policy, critic = parameters.optimizer, parameters.critic
    own = {"lr": critic.lr, "warmup_steps": critic.warmup_steps, "init_lr": 0.0}
    own["min_lr"] = policy.min_lr * critic.lr / policy.lr
    if policy.decay_steps is not None:
        own["decay_steps"] = policy.decay_steps + _pretraining(parameters)
    return policy.model_copy(update=own)


def _pretraining(parameters: Parameters) -> int:
    """Optimizer steps that the critic takes before the policy's first."""
    if not parameters.algorithm.has_critic:
        return 0
    return parameters.critic.pretrain_steps * batch_plan(parameters).num_steps_per_rollout


def batch_plan(parameters: Parameters) -> BatchPlan:
    """The batch plan of a run, from its `data` and `algorithm` sections; one that trains nothing needs only `data`."""
    if parameters.engines.train == "none":
        data = parameters.data
        return solve(data.rollout_batch_size, data.n_samples_per_prompt, num_steps_per_rollout=1)
    return solve(
        rollout_batch_size=parameters.data.rollout_batch_size,
        n_samples_per_prompt=parameters.data.n_samples_per_prompt,
        global_batch_size=parameters.algorithm.global_batch_size,
        num_steps_per_rollout=parameters.algorithm.num_steps_per_rollout,
    )
