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
from milepost.flows.plan import check_lengths, check_names, check_size
from milepost.flows.planned_prompts import load_sets
from milepost.flows.recipe import parameters_of, read_recipe, with_overrides
from milepost.storage import attempts, files
from milepost.storage.eval_sets import check_sets, eval_sets, named
from milepost.storage.parameters import EvalSection, EvalSet, ModelSection, Parameters, SyncSection
from milepost.storage.stages import Course
from milepost.storage.weight_version import WeightVersion
from milepost.tasks.evaluate import set_plan

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
    every set. What is to be compared with an evaluation is put, answered and scored `like` it, and weights of no run
    are on engines like its.
    """
    model_config = json.loads(Path(weights.model_dir, "config.json").read_text())
    given = _given(weights, config, overrides, like)
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


def checked_set(values: Mapping[str, Any]) -> EvalSet:
    """A set of these values; ValueError in one sentence for the first that is wrong."""
    try:
        return EvalSet(**values)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{first['loc'][0]} is {first['input']!r}: {first['msg'].lower()}") from None


def _given(weights: Weights, config: str, overrides: Sequence[str], like: Parameters | None) -> dict[str, Any]:
    content: dict[str, Any] = like.model_dump(mode="json", exclude={"model"}) if like else {}
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
