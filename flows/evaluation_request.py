"""What an evaluation is asked to do: which weights, on which data sets, with which engines; all of it checked."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pydantic import ValidationError

from milepost.engines.sglang_flags import check_sglang
from milepost.flows.checkpoint import Weights, find_weights
from milepost.flows.engine_checks import check_engines, check_gpus
from milepost.flows.evaluation_results import is_evaluation, require_evaluation, shared_sets
from milepost.flows.plan import check_lengths, check_names, check_size
from milepost.flows.planned_prompts import load_sets
from milepost.flows.recipe import parameters_of, read_recipe, with_overrides
from milepost.storage import attempts, files, runs
from milepost.storage.eval_sets import check_sets, eval_sets, named
from milepost.storage.parameters import EvalSection, EvalSet, ModelSection, Parameters, SyncSection
from milepost.storage.runs import RunFolder
from milepost.storage.stages import Course
from milepost.storage.weight_version import WeightVersion
from milepost.tasks.evaluate import set_plan
from milepost.tasks.prompt_reward import chosen as chosen_reward
from milepost.tasks.prompt_reward import of_eval_set
from milepost.tasks.reward_choice import RewardChoice

RUN_KEYS = ("run", "root", "steps")
COURSE = Course(last="score")
NAME_ROOM = 100  # characters of a run's name in that of its evaluation
SCORED_BY = ("data", "rollout", "reward")  # the sections that say how prompts are put, answered and scored


@dataclass(frozen=True)
class EvaluationPlan:
    """An evaluation that can start: every name resolved, every path read."""

    run: str
    root: str
    weights: Weights
    parameters: Parameters
    model_config: dict[str, Any]
    prompts: pa.Table


def plan_evaluation(
    checkpoint: str,
    run: str,
    root: str,
    *,
    sets: Sequence[EvalSet] = (),
    config: str = "",
    overrides: Sequence[str] = (),
    sampling: Mapping[str, Any] | None = None,
    like: Parameters | None = None,
) -> EvaluationPlan:
    """Check everything that can be checked before processes start; see `plan_of`."""
    weights = find_weights(checkpoint, root)
    return plan_of(weights, run, root, sets=sets, config=config, overrides=overrides, sampling=sampling, like=like)


def plan_of(
    weights: Weights,
    run: str,
    root: str,
    *,
    sets: Sequence[EvalSet] = (),
    config: str = "",
    overrides: Sequence[str] = (),
    sampling: Mapping[str, Any] | None = None,
    like: Parameters | None = None,
) -> EvaluationPlan:
    """An evaluation of `weights`.

    Parameters are those of the run that they are of, then the recipe's, then `overrides`; `sampling` replaces values of
    every set. What is to be compared with an evaluation is put, answered and scored `like` it.
    """
    model_config = json.loads(Path(weights.model_dir, "config.json").read_text())
    given = _given(weights, config, overrides)
    if like is not None:
        given |= {name: getattr(like, name).model_dump() for name in SCORED_BY}
        given["model"] = {**given.get("model", {}), "context_length": like.model.context_length}
    chosen = parameters_of(_fitting(given, model_config))
    wanted = [checked_set({**item.model_dump(), **(sampling or {})}) for item in (sets or eval_sets(chosen.eval))]
    parameters = _alone(chosen, weights, [named(item) for item in wanted])
    _check(parameters, model_config)
    resolved = parameters.resolved(going_on=weights.run is not None)
    prompts = load_sets(parameters.eval.sets, resolved, weights.model_dir)
    return EvaluationPlan(run, root, weights, parameters, model_config, prompts)


def evaluation_name(run: str, version: WeightVersion, sets: Sequence[EvalSet], settings: Sequence[str] = ()) -> str:
    """What an evaluation is called that nobody named: the same whenever these weights are evaluated in this way."""
    what = [version.digest, [item.model_dump(mode="json") for item in sets], list(settings)]
    return f"{run[:NAME_ROOM]}-at-{version.step:06d}-{files.digest_of(files.canonical_json(what).encode())[:8]}"


@dataclass(frozen=True)
class Baseline:
    """What an evaluation is compared with: a finished one, or one that is still to be made, by `plan`."""

    folder: RunFolder
    plan: EvaluationPlan | None = None


def plan_baseline(
    compare: str, run: str, root: str, like: Parameters, *, config: str = "", overrides: Sequence[str] = ()
) -> Baseline:
    """The evaluation called `compare`, or one of that checkpoint on the sets of the evaluation `like` which it is."""
    sets = like.eval.sets
    if compare in [folder.run_id for folder in runs.run_folders(root)]:
        folder = runs.run_folder(root, compare)
        if is_evaluation(folder):
            require_evaluation(folder)
            _require_same_rewards(like, folder, shared_sets([item.name for item in sets], folder))
            return Baseline(folder)
    name = f"{run}-baseline"
    plan = plan_evaluation(compare, name, root, sets=sets, config=config, overrides=overrides, like=like)
    return Baseline(runs.run_folder(root, name), plan)


def _require_same_rewards(like: Parameters, before: RunFolder, shared: Sequence[str]) -> None:
    """ValueError for a set whose scores there say something else than here."""
    here, there = _rewards(like), _rewards(attempts.current(before).parameters)
    for name in shared:
        if here[name] != there[name]:
            raise ValueError(
                f"evaluation {before.run_id!r} scored {name!r} by {_said(there[name])}, this one does by "
                f"{_said(here[name])}: give it the same reward, or a checkpoint to compare with"
            )


def _rewards(parameters: Parameters) -> dict[str, RewardChoice]:
    return {item.name: chosen_reward(of_eval_set(item, parameters.reward)) for item in parameters.eval.sets}


def _said(choice: RewardChoice) -> str:
    """A reward with what tells it from another of its name."""
    return " + ".join(f"{part.name} {dict(part.options) or ''}".strip() for part in choice.parts)


def checked_set(values: Mapping[str, Any]) -> EvalSet:
    """A set of these values; ValueError in one sentence for the first that is wrong."""
    try:
        return EvalSet(**values)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{first['loc'][0]} is {first['input']!r}: {first['msg'].lower()}") from None


def _given(weights: Weights, config: str, overrides: Sequence[str]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if weights.run is not None:
        content = attempts.current(weights.run).parameters.model_dump(mode="json")
        # Servers that the run attached to are the run's: loading other weights into them would be its end.
        content["engines"] |= {"sglang_urls": []}
        if content["engines"]["rollout"] == "none":
            del content["engines"]["rollout"]
    recipe = read_recipe(config) if config else {}
    for name, fields in recipe.items():
        if name not in RUN_KEYS:
            content[name] = {**content.get(name, {}), **fields} if isinstance(fields, dict) else fields
    return with_overrides(content, list(overrides))


def _fitting(content: dict[str, Any], model_config: Mapping[str, Any]) -> dict[str, Any]:
    """With a context that nobody gave cut to what the model has."""
    model, default = content.get("model", {}), ModelSection().context_length
    fitting = min(default, int(model_config.get("max_position_embeddings", default)))
    return content | {"model": {"context_length": fitting, **model}}


def _alone(parameters: Parameters, weights: Weights, sets: list[EvalSet]) -> Parameters:
    """The same without a trainer: engines have their devices to themselves, and load folders."""
    if not sets:
        raise ValueError("there is nothing to evaluate on: give --data FILE, or a recipe or run with an eval section")
    check_sets(sets)
    return parameters.model_copy(
        update={
            "model": parameters.model.model_copy(update={"path": weights.model_dir}),
            "perf": parameters.perf.model_copy(update={"colocate": False}),
            "sync": SyncSection(timeout_seconds=parameters.sync.timeout_seconds),
            "eval": EvalSection(sets=sets),
            "engines": parameters.engines.model_copy(update={"train": "none"}),
        }
    )


def _check(parameters: Parameters, config: dict[str, Any]) -> None:
    check_size(parameters)
    check_names(parameters, COURSE)
    for item in parameters.eval.sets:
        check_lengths(parameters.model_copy(update={"rollout": set_plan(0, item, parameters).rollout}))
    check_engines(parameters, COURSE)
    if parameters.engines.rollout == "sglang":
        check_sglang(parameters)
    check_gpus(config, parameters)
