"""Whether what a run asks of its algorithm goes together: asked by a plan, and before a run goes on."""

from milepost.storage.batch_plan import BatchPlan
from milepost.storage.parameters import Parameters
from milepost.storage.stages import WHOLE, Course
from milepost.storage.training import AlgorithmSection, CriticSection
from milepost.tasks.advantages import BASELINES, DISCOUNTED, PER_TOKEN


def check_algorithm(parameters: Parameters, batch: BatchPlan, course: Course = WHOLE) -> None:
    """ValueError for a combination that would train nothing, or something else than it says."""
    if course.makes("filter"):
        _check_filter(parameters, batch)
    if course.trains:
        _check_advantage(parameters.algorithm, batch)
        _check_critic(parameters)
        _check_divergence(parameters.algorithm)
        _check_reference(parameters)
        _check_temperature(parameters)


def _check_filter(parameters: Parameters, batch: BatchPlan) -> None:
    if parameters.filter.group == "nonzero_std" and batch.n_samples_per_prompt == 1:
        raise ValueError(
            "filter.group 'nonzero_std' drops every group of one sample: raise data.n_samples_per_prompt from 1, or "
            "choose another filter"
        )


def _check_advantage(algorithm: AlgorithmSection, batch: BatchPlan) -> None:
    name = algorithm.advantage
    if name == "ppo":  # what users of others know it as
        raise ValueError("algorithm.advantage 'ppo' is called 'gae' here, and the loss of PPO ppo_clip: take gae")
    if name in BASELINES and batch.n_samples_per_prompt == 1:
        raise ValueError(
            f"algorithm.advantage {name!r} compares the samples of a group, and with data.n_samples_per_prompt 1 it is "
            "always 0: give more samples, or take reinforce or reinforce_plus_plus"
        )
    if algorithm.gamma != 1 and name not in DISCOUNTED:
        raise ValueError(
            f"algorithm.gamma is {algorithm.gamma:g} and advantage {name!r} discounts nothing: leave it at 1, or take "
            f"{', '.join(DISCOUNTED)}"
        )


def _check_critic(parameters: Parameters) -> None:
    algorithm, critic, usual = parameters.algorithm, parameters.critic, CriticSection()
    given = [f"critic.{name} is {value!r}" for name, value in critic if value != getattr(usual, name)]
    if algorithm.gae_lambda != AlgorithmSection().gae_lambda:
        given.append(f"algorithm.gae_lambda is {algorithm.gae_lambda:g}")
    if given and not algorithm.has_critic:
        raise ValueError(
            f"{given[0]} and advantage {algorithm.advantage!r} has no critic: leave it out, or set "
            "algorithm.advantage=gae"
        )


def _check_divergence(algorithm: AlgorithmSection) -> None:
    in_loss, in_reward = algorithm.kl_loss_coef, algorithm.kl_reward_coef
    if in_loss and in_reward:
        raise ValueError(
            f"algorithm.kl_loss_coef is {in_loss:g} and kl_reward_coef {in_reward:g}, which counts the divergence "
            "twice: set one of them to 0"
        )
    if in_reward and algorithm.advantage not in PER_TOKEN:
        raise ValueError(
            f"algorithm.kl_reward_coef is {in_reward:g} and advantage {algorithm.advantage!r} has no reward for each "
            f"token: set kl_loss_coef instead, or take {' or '.join(PER_TOKEN)}"
        )
    if algorithm.kl_unbiased and not in_loss:
        raise ValueError(
            "algorithm.kl_unbiased is on and the loss has no divergence: set algorithm.kl_loss_coef, or leave it off"
        )


def _check_reference(parameters: Parameters) -> None:
    every, algorithm = parameters.reference.refresh_every_steps, parameters.algorithm
    if every and not (algorithm.kl_loss_coef or algorithm.kl_reward_coef or parameters.reference.path):
        raise ValueError(
            f"reference.refresh_every_steps is {every} and nothing is compared with a reference: set "
            "algorithm.kl_loss_coef, or leave it at 0"
        )


def _check_temperature(parameters: Parameters) -> None:
    if not parameters.rollout.temperature:
        raise ValueError(
            "rollout.temperature is 0, and what always takes the likeliest token has no probabilities to train: raise "
            "it, or set engines.train=none to only generate"
        )
