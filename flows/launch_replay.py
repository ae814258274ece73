"""Replays from the command line, against a Prefect server that is there or is started, and what is shown of them."""

import json
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, get_args

from rich.console import Console
from rich.table import Table

from milepost.flows.cli_options import print_done
from milepost.flows.launch import run_flow, serving, summary
from milepost.flows.recipe import require_references
from milepost.flows.replay import replay
from milepost.flows.replay_into import First, check_kept, plan_kept
from milepost.flows.step_range import require_steps, step_range
from milepost.flows.what_if import changed, what_if
from milepost.storage import attempts, manifest, purges, redaction, runs
from milepost.storage.origin import require_own_reward
from milepost.storage.parent import trained_steps
from milepost.storage.runs import RunFolder


def judge(run: str, root: str, *, steps: str, first: str, tolerance: float | None) -> dict[str, Any]:
    """Replay and compare; what cannot be is refused before any server is started."""
    chosen = _stage(first)
    check_kept(chosen, "", ())
    folder = runs.run_folder(root, run)
    _check_steps(folder, steps)
    if chosen == "score":
        reward = attempts.current(folder).parameters.reward.name
        require_own_reward(run, reward, "replay it --from filter, or regrade it with --reward")
        _require_secrets(folder)
    return _run(lambda: replay(run=run, root=root, steps=steps, first=chosen, tolerance=tolerance))


def keep(
    run: str, root: str, into: str, *, steps: str, first: str, overrides: Sequence[str], tolerance: float | None
) -> dict[str, Any]:
    """Replay as a new run: what it came to, with the verdict where everything is to be as it was."""
    chosen, folder = _stage(first), runs.run_folder(root, run)
    require_references(overrides)
    plan_kept(folder, root, _check_steps(folder, steps), chosen, into=into, overrides=overrides)
    found = _run(
        lambda: replay(
            run=run,
            root=root,
            steps=steps,
            first=chosen,
            tolerance=tolerance,
            into=into,
            overrides=tuple(overrides),
        )
    )
    return {"kept": summary(runs.run_folder(root, into)), **found}


def _require_secrets(folder: RunFolder) -> None:
    """A replay is of what the run had, so nobody can give it a secret that the run does not store."""
    if found := redaction.masks({"reward": attempts.current(folder).parameters.reward.model_dump()}):
        raise ValueError(
            f"{found[0]} is a secret that run {folder.run_id!r} does not store: replay it --from filter, or regrade it "
            "with --reward and --options"
        )


def _stage(text: str) -> First:
    known: dict[str, First] = {stage: stage for stage in get_args(First)}
    if text not in known:
        raise ValueError(f"--from {text!r} is no stage that can be replayed: give one of {', '.join(known)}")
    return known[text]


def ask(run: str, root: str, overrides: Sequence[str], *, steps: str, out: str) -> dict[str, Any]:
    """What would have been otherwise under `overrides`."""
    folder = runs.run_folder(root, run)
    require_references(overrides)
    record = require_steps(folder)
    changed(record.parameters, list(overrides), steps=trained_steps(record))
    _check_steps(folder, steps)
    return _run(lambda: what_if(run=run, overrides=tuple(overrides), root=root, steps=steps, out=out))


def _check_steps(folder: RunFolder, steps: str) -> range:
    require_steps(folder)
    chosen = step_range(steps, len(manifest.finished_steps(folder)))
    for step in chosen:
        purges.require_whole(folder.step(step))
    return chosen


def _run(begin: Callable[[], Coroutine[Any, Any, dict[str, Any]]]) -> dict[str, Any]:
    with serving():
        return run_flow(begin)


def show_verdict(found: dict[str, Any], *, as_json: bool) -> None:
    """The verdict, and a line for every difference."""
    if as_json:
        print(json.dumps(found))
        return
    for stage in found["stages"]:
        if stage["difference"]:
            print(stage["difference"])
    deviation = max((stage["deviation"] for stage in found["stages"]), default=0.0)
    allowed = f", {found['tolerance']:g} is allowed" if found["tolerance"] else ""
    steps = f"steps {found['begin']} to {found['end'] - 1}"
    print(f"{found['run']}: {found['verdict']} in {steps}; largest deviation {deviation:.3g}{allowed}")


def show_kept(found: dict[str, Any], *, as_json: bool) -> None:
    """What the new run came to, and its verdict if it has one."""
    print_done(found if as_json else found["kept"], as_json)
    if not as_json and "verdict" in found:
        show_verdict(found, as_json=False)


HEADLINE = "kept_groups", "advantage_magnitude", "loss", "grad_norm", "pg_clipfrac"


def show_changes(found: dict[str, Any], *, as_json: bool) -> None:
    """A row a step; the numbers that matter most as they were and as they would have been."""
    if as_json:
        print(json.dumps(found))
        return
    differing = list(dict.fromkeys(row["metric"] for row in found["rows"] if row["stored"] != row["now"]))
    names = [name for name in HEADLINE if name in differing] or differing[: len(HEADLINE)]
    changes = ", ".join(f"{key} {before!r} -> {after!r}" for key, (before, after) in found["changes"].items())
    heads = [name.removesuffix("_magnitude") for name in names]
    table = Table("step", *heads, title=f"{found['run']} with {changes}", title_justify="left")
    cells = {(row["step"], row["metric"]): _cell(row["stored"], row["now"]) for row in found["rows"]}
    for step in dict.fromkeys(row["step"] for row in found["rows"]):
        table.add_row(str(step), *(cells.get((step, name), "") for name in names))
    Console().print(table if names else f"{found['run']} with {changes}: no number differs")
    if rest := [name for name in differing if name not in names]:
        print(f"also differing, and in --out and --json: {', '.join(rest)}")


def _cell(stored: float | None, now: float | None) -> str:
    before, after = ("none" if value is None else f"{value:.4g}" for value in (stored, now))
    return before if before == after else f"{before} -> {after}"
