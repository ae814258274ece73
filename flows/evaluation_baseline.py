"""What an evaluation is compared with: an earlier one, or one of other weights that is made when it is finished."""

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from milepost.flows.checkpoint import Weights
from milepost.flows.evaluation import require_same
from milepost.flows.evaluation_request import EvaluationPlan, plan_evaluation
from milepost.flows.evaluation_results import is_evaluation, require_evaluation, scored, shared_sets
from milepost.storage import attempts, files, runs
from milepost.storage.eval_sets import set_rows
from milepost.storage.parameters import Parameters
from milepost.storage.runs import RunFolder
from milepost.storage.tables import read_table
from milepost.tasks.eval_scores import items
from milepost.tasks.paired import require_shared
from milepost.tasks.prompt_reward import chosen, of_eval_set
from milepost.tasks.reward_choice import RewardChoice


@dataclass(frozen=True)
class Baseline:
    """What an evaluation is compared with; one that is not finished is made by `plan`, or goes on without one.

    `name` names it later, too, when there are newer checkpoints. `lacks` are the sets that it has no scores of.
    """

    folder: RunFolder
    name: str
    plan: EvaluationPlan | None = None
    lacks: tuple[str, ...] = ()


def plan_baseline(
    compare: str,
    run: str,
    root: str,
    like: Parameters,
    prompts: pa.Table,
    *,
    config: str = "",
    overrides: Sequence[str] = (),
    going_on: bool = False,
) -> Baseline:
    """The evaluation called `compare`, or one of that checkpoint that is made as the evaluation `run` is.

    `like` and `prompts` are those of `run`; when that is `going_on`, the one that was begun for it goes on, too.
    """
    if compare in [folder.run_id for folder in runs.run_folders(root)]:
        folder = runs.run_folder(root, compare)
        if is_evaluation(folder):
            return _earlier(folder, like, prompts)
    folder = runs.run_folder(root, f"{run}-baseline")
    if going_on and is_evaluation(folder):
        return Baseline(folder, compare)
    sets, name = like.eval.sets, folder.run_id
    plan = plan_evaluation(compare, name, root, sets=sets, config=config, overrides=overrides, like=like)
    if files.exists(folder.record):
        require_same(plan, folder)
    return Baseline(folder, _lasting_name(plan.weights, root), plan)


def _earlier(folder: RunFolder, like: Parameters, prompts: pa.Table) -> Baseline:
    """A finished evaluation; ValueError when it was scored otherwise, or on other prompts."""
    require_evaluation(folder)
    names = [item.name for item in like.eval.sets]
    shared = shared_sets(names, folder)
    _require_same_rewards(like, folder, shared)
    before = scored(folder)
    for name in shared:
        asked = set_rows(prompts, name)["prompt_id"].to_pylist()
        require_shared(name, items(read_table(before[name].table)), asked)
    return Baseline(folder, folder.run_id, lacks=tuple(name for name in names if name not in shared))


def _lasting_name(weights: Weights, root: str) -> str:
    """What names just these weights when the run has newer ones, wherever it is read."""
    if weights.run is None:
        return weights.model_dir
    if runs.run_folder(root, weights.run.run_id).uri == weights.run.uri:
        return weights.label
    return weights.run.checkpoint(weights.version.step) if weights.version else weights.model_dir


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
    return {item.name: chosen(of_eval_set(item, parameters.reward)) for item in parameters.eval.sets}


def _said(choice: RewardChoice) -> str:
    """A reward with what tells it from another of its name."""
    return " + ".join(f"{part.name} {dict(part.options) or ''}".strip() for part in choice.parts)
