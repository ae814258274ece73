"""The data sets of an evaluation, each with a name, checked; and where their prompts are in one stored table."""

import pyarrow as pa
import pyarrow.compute as pc

from milepost.storage.data_sets import check_names, dataset_name
from milepost.storage.parameters import EvalSection, EvalSet
from milepost.storage.prompt_source import parse_path

SHARD_SAMPLES = 256


def named(eval_set: EvalSet) -> EvalSet:
    """The set with its name: that of its file when it has none."""
    return eval_set.model_copy(update={"name": eval_set.name or dataset_name(parse_path(eval_set.path)[0])})


def eval_sets(section: EvalSection) -> list[EvalSet]:
    """Every set of an eval section, that of its `path` first; ValueError for one that cannot be evaluated."""
    fields = ("path", "max_new_tokens", "n_samples_per_prompt", "temperature", "k", "threshold")
    own = [EvalSet(**{name: getattr(section, name) for name in fields})] if section.path else []
    found = [named(item) for item in (*own, *section.sets)]
    check_sets(found)
    return found


def check_sets(sets: list[EvalSet]) -> None:
    """ValueError names the first set that cannot be evaluated, and says why."""
    check_names([(item.name, item.path) for item in sets], "NAME=FILE")
    for item in sets:
        _check_sampling(item)


def _check_sampling(item: EvalSet) -> None:
    n, largest = item.n_samples_per_prompt, max(item.k, default=1)
    if largest > n:
        raise ValueError(f"pass@{largest} of {item.name!r} needs {largest} samples a prompt and there are {n}: raise n")
    if n > 1 and item.temperature == 0:
        raise ValueError(f"{n} samples of {item.name!r} at temperature 0 are all the same: take one, or raise it")


def passes(item: EvalSet) -> list[int]:
    """The k of pass@k: those asked for, else the powers of two up to the samples of a prompt."""
    return sorted(set(item.k)) or [2**power for power in range(item.n_samples_per_prompt.bit_length())]


def temperature(item: EvalSet) -> float:
    """0 is greedy."""
    chosen = item.temperature
    return (0.0 if item.n_samples_per_prompt == 1 else 1.0) if chosen is None else chosen


def shard_count(item: EvalSet, prompts: int) -> int:
    """In how many parts a set of so many prompts is evaluated."""
    samples = item.n_samples_per_prompt if temperature(item) else 1
    return -(-prompts * samples // SHARD_SAMPLES)


def set_rows(prompts: pa.Table, name: str) -> pa.Table:
    """The prompts of the set called `name` in a table of several, in their order."""
    return prompts.filter(pc.equal(prompts["dataset"], name)).combine_chunks()


def as_set(prompts: pa.Table, name: str) -> pa.Table:
    """Prompts under the name of their set."""
    place = prompts.schema.get_field_index("dataset")
    return prompts.set_column(place, prompts.schema.field(place), pa.array([name] * prompts.num_rows, pa.string()))
