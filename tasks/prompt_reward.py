"""Which reward scores a sample: the run's, a sum of several, or the one that the sample's prompt asks for."""

from collections.abc import Mapping
from typing import Any

from milepost.storage.parameters import EvalSet, RewardSection
from milepost.storage.prompt_rows import reward_of
from milepost.tasks.reward_choice import Part, RewardChoice, asks_others, single


def chosen(reward: RewardSection) -> RewardChoice:
    """What a reward section says of prompts that ask for no reward themselves."""
    if not reward.parts:
        return single(reward.name, reward.options, network=reward.network)
    parts = tuple(Part(part.name, part.options, part.weight) for part in reward.parts)
    return RewardChoice(parts, summed=True, network=reward.network or any(asks_others(part.name) for part in parts))


def choice_for(metadata: Mapping[str, Any], reward: RewardSection) -> RewardChoice:
    """What scores the samples of a prompt with this metadata; a reward that a prompt names has its default options."""
    name = reward_of(metadata) if reward.by_prompt else None
    if name is None or (name == reward.name and not reward.parts):
        return chosen(reward)
    return single(name, {}, network=reward.network)


def of_eval_set(item: EvalSet, reward: RewardSection) -> RewardSection:
    """How the samples of an evaluated set are scored: by the reward that it names, else like those of training."""
    if not item.reward:
        return reward
    named = {"name": item.reward, "options": item.reward_options, "parts": [], "by_prompt": False}
    return reward.model_copy(update=named)
