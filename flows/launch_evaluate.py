"""Evaluations from the command line: checked first, then worked on as a flow, and shown as tables."""

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from milepost.flows.evaluate import Regressed, evaluate
from milepost.flows.evaluation import require_same
from milepost.flows.evaluation_baseline import plan_baseline
from milepost.flows.evaluation_request import checked_set, plan_evaluation
from milepost.flows.failure import sentence
from milepost.flows.launch import work
from milepost.flows.progress import say
from milepost.flows.sharing import plan_shared
from milepost.storage import files, runs
from milepost.storage.runs import RunFolder

Found = tuple[dict[str, Any], str]


@dataclass(frozen=True)
class Wanted:
    """An evaluation that somebody asked for. `sampling` replaces values of every set."""

    checkpoint: str
    run: str
    root: str
    data: list[dict[str, Any]]
    sampling: dict[str, Any]
    compare: str
    max_drop: float | None
    config: str
    overrides: tuple[str, ...]
    engines_of: str = ""


def launch_evaluation(wanted: Wanted) -> Found:
    """What the evaluation came to, and which sets fell by more than they may; bad input is refused before all else."""
    folder = runs.run_folder(wanted.root, wanted.run)
    sets = [checked_set(item | wanted.sampling) for item in wanted.data]
    options: dict[str, Any] = {"config": wanted.config, "overrides": wanted.overrides}
    what: dict[str, Any] = {"sets": sets, "sampling": wanted.sampling, **options}
    if wanted.engines_of:
        plan = plan_shared(wanted.engines_of, wanted.checkpoint, wanted.run, wanted.root, **what)
    else:
        plan = plan_evaluation(wanted.checkpoint, wanted.run, wanted.root, **what)
        if files.exists(folder.record):
            require_same(plan, folder)
    if wanted.compare:
        plan_baseline(wanted.compare, wanted.run, wanted.root, plan.parameters, plan.prompts, **options)
    return _work(
        folder,
        wanted.root,
        lambda: evaluate(
            checkpoint=wanted.checkpoint,
            run=wanted.run,
            root=wanted.root,
            evals=plan.parameters.eval.sets,
            compare=wanted.compare,
            max_drop=wanted.max_drop,
            config=wanted.config,
            overrides=wanted.overrides,
            engines_of=wanted.engines_of,
        ),
        ray=not wanted.engines_of,
    )


def relaunch_evaluation(run: str, root: str) -> Found:
    """Go on with an evaluation that was stopped, as far as to the comparison that was asked for."""
    return _work(runs.run_folder(root, run), root, lambda: evaluate(checkpoint="", run=run, root=root))


def _work(
    folder: RunFolder, root: str, begin: Callable[[], Coroutine[Any, Any, dict[str, Any]]], *, ray: bool = True
) -> Found:
    cannot_be = (ValueError, LookupError)  # what the evaluation was asked for
    try:
        return work(folder, root, begin, kind="evaluation", as_it_is=(Regressed, *cannot_be), ray=ray), ""
    except Regressed as error:
        say(sentence(error))
        return error.found, str(error)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _interval(low: float | None, high: float | None, sign: str = "") -> str:
    return "" if low is None or high is None else f"{low:{sign}.4f} to {high:{sign}.4f}"


def _beside(title: str, columns: dict[str, dict[str, str]]) -> Table:
    """A column a data set, a row a number; what no set has is left out."""
    table = Table("", *columns, title=title, title_justify="left")
    for name in dict.fromkeys(name for column in columns.values() for name in column):
        cells = [column.get(name, "") for column in columns.values()]
        if any(cells):
            table.add_row(name, *cells)
    return table


def _score_cells(score: dict[str, Any]) -> dict[str, str]:
    found = {
        "prompts": str(score["prompts"]),
        "samples of each": str(score["n_samples_per_prompt"]),
        "mean score": _number(score["mean"]),
        "95 % interval": _interval(score["low"], score["high"]),
    }
    found |= {f"pass@{k}": _number(value) for k, value in score["pass_at"].items()}
    return found | {
        "majority vote": _number(score["majority"]),
        "tokens, mean": f"{score['length_mean']:.1f}",
        "truncated": f"{100 * score['truncated']:.1f} %",
        "unscorable": str(score["unscorable"]),
    }


def _pair_cells(pair: dict[str, Any]) -> dict[str, str]:
    return {
        "items": str(pair["items"]),
        "not in both": str(pair["unmatched"] or ""),
        "mean there": _number(pair["before"]),
        "mean here": _number(pair["after"]),
        "difference": f"{pair['difference']:+.4f}",
        "95 % interval": _interval(pair["low"], pair["high"], "+"),
        f"p ({pair['test']})": f"{pair['p']:.3g}",
    }


def show_evaluation(found: dict[str, Any]) -> None:
    """Sets by what was measured of them, and how they differ from those compared with."""
    console = Console()
    title = f"{found['checkpoint']}, weights {found['weights'][:18]}"
    console.print(_beside(title, {score["name"]: _score_cells(score) for score in found["sets"]}))
    if found["compared"]:
        pairs = {pair["name"]: _pair_cells(pair) for pair in found["compared"]["sets"]}
        console.print(_beside(f"against {found['compared']['label']}", pairs))
    print(f"evaluation {found['run']}; report {found['report']}")
