"""The prompts that a plan names, read and checked: those that are trained on, and those of every held-out set."""

from collections.abc import Sequence
from contextlib import nullcontext

import pyarrow as pa

from milepost.flows.prompt_tokenizer import prompt_tokenizer
from milepost.storage.eval_sets import as_set, eval_sets
from milepost.storage.parameters import DataSection, EvalSet, Parameters, RewardSection
from milepost.storage.prompts import PromptSet, load_prompts
from milepost.storage.redaction import masked_text
from milepost.tasks.labels import LabelCheck
from milepost.tasks.prompt_reward import of_eval_set


def load_planned(
    data: DataSection,
    parameters: Parameters,
    model_dir: str,
    *,
    reward: RewardSection | None,
    quarantine: str | None = None,
) -> PromptSet:
    """The prompts of `data`, with labels that `reward` can grade."""
    tokenizer = prompt_tokenizer(parameters, model_dir)
    room = parameters.model.context_length
    try:
        with LabelCheck(reward) if reward else nullcontext() as check:
            return load_prompts(data, tokenizer, context_length=room, quarantine_uri=quarantine, check_labels=check)
    except ValueError as error:  # it names the path, and Prefect stores what a flow raised
        raise ValueError(masked_text(str(error))) from None


def load_eval_prompts(parameters: Parameters, model_dir: str) -> pa.Table | None:
    """The prompts of every set of `eval`, each under the name of its set; None when nothing is to be evaluated."""
    sets = eval_sets(parameters.eval) if parameters.eval.every_steps else []
    return load_sets(sets, parameters, model_dir) if sets else None


def load_sets(sets: Sequence[EvalSet], parameters: Parameters, model_dir: str) -> pa.Table:
    """The prompts of some sets in one table."""
    found = [
        load_planned(
            _eval_data(item, parameters), parameters, model_dir, reward=of_eval_set(item, parameters.reward)
        ).table
        for item in sets
    ]
    return pa.concat_tables([as_set(table, item.name) for table, item in zip(found, sets, strict=True)])


def _eval_data(item: EvalSet, parameters: Parameters) -> DataSection:
    """Held-out prompts are read like those that are trained on, and all of them that fit the context are asked."""
    return parameters.data.model_copy(update={"path": item.path, "sets": [], "max_prompt_tokens": None})
