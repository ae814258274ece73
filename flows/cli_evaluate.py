"""The command `evaluate`."""

import json
import re
from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any

import typer

from milepost.flows.cli_options import FAULTY, AsJson, Overrides, Root
from milepost.flows.recipe import DEFAULT_ROOT, absolute_root, json_or_text

evaluate_app = typer.Typer(rich_markup_mode=None)

_NAMED = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)=(.*)")


def data_set(text: str) -> dict[str, Any]:
    """`FILE` or `NAME=FILE`."""
    found = _NAMED.fullmatch(text)
    return {"name": found[1], "path": found[2]} if found else {"path": text}


def numbers(text: str) -> list[int]:
    """`1,4,8`."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--k {text!r} must be whole numbers with commas, such as 1,4,8") from None


def reward_options(given: Sequence[str]) -> dict[str, Any]:
    """`NAME=VALUE` each, with a value that is JSON or text."""
    found = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--reward-option {text!r} must look like NAME=VALUE")
        found[name] = json_or_text(value)
    return found


@evaluate_app.command()
def evaluate(
    checkpoint: Annotated[
        str,
        typer.Argument(help="Model folder, checkpoint folder, RUN@STEP, RUN@latest, RUN@best or package:NAME."),
    ] = "",
    data: Annotated[
        list[str] | None,
        typer.Option(help="Prompt set, as FILE or NAME=FILE, FILE@[a:b] for a slice; repeatable (default: the run's)."),
    ] = None,
    reward: Annotated[str | None, typer.Option(help="Reward of every set (default: the run's).")] = None,
    reward_option: Annotated[list[str] | None, typer.Option(help="Option of --reward, as NAME=VALUE.")] = None,
    n: Annotated[int | None, typer.Option("--n", help="Samples of each prompt (default: 1).")] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Sampling temperature (default: 0 with one sample, 1 with more).")
    ] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="One sample a prompt, the likeliest token always.")] = False,
    max_new_tokens: Annotated[int | None, typer.Option(help="Longest response (default: the run's).")] = None,
    k: Annotated[str | None, typer.Option("--k", help="For pass@k, as 1,4,8 (default: powers of two).")] = None,
    threshold: Annotated[float | None, typer.Option(help="Score from which a sample is right (default: 1).")] = None,
    compare: Annotated[str, typer.Option(help="Checkpoint or earlier evaluation to compare with.")] = "",
    max_drop: Annotated[
        float | None, typer.Option(min=0, help="Exit code 3 when a mean is lower by more than this and p < 0.05.")
    ] = None,
    run: Annotated[str | None, typer.Option("--run", help="Name of the evaluation; the same one goes on.")] = None,
    engines_of: Annotated[
        str,
        typer.Option(help="Run that trains now and evaluates its newest weights between two steps, on its engines."),
    ] = "",
    config: Annotated[str, typer.Option("--config", "-c", help="Recipe with what differs from the run.")] = "",
    set: Overrides = None,
    root: Root = None,
    as_json: AsJson = False,
) -> None:
    """Score a checkpoint on held-out data sets: mean with interval, pass@k, majority vote; compare it with another."""
    from milepost.flows.launch_evaluate import Wanted, launch_evaluation

    if not (checkpoint or engines_of):
        raise ValueError(
            "there is nothing to evaluate: give a checkpoint, such as RUN@latest, or a run as --engines-of"
        )
    if greedy and (temperature or (n or 1) > 1):
        raise ValueError("--greedy is one sample at temperature 0: leave --n and --temperature out, or --greedy")
    if max_drop is not None and not compare:
        raise ValueError("--max-drop needs what a score may not drop from: name it with --compare")
    if reward_option and reward is None:
        raise ValueError("--reward-option is an option of --reward: name it too")
    sampling = {
        "n_samples_per_prompt": 1 if greedy else n,
        "temperature": 0.0 if greedy else temperature,
        "max_new_tokens": max_new_tokens,
        "k": None if k is None else numbers(k),
        "threshold": threshold,
        "reward": reward,
        "reward_options": None if reward is None else reward_options(reward_option or []),
    }
    named = checkpoint or f"{engines_of}@latest"
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", named.rstrip("/").rpartition("/")[2].replace("package:", ""))
    wanted = Wanted(
        checkpoint=checkpoint,
        run=run or f"eval-{stem}-{datetime.now():%Y%m%d-%H%M%S}",
        root=absolute_root(root or DEFAULT_ROOT),
        data=[data_set(text) for text in data or []],
        sampling={name: value for name, value in sampling.items() if value is not None},
        compare=compare,
        max_drop=max_drop,
        config=config,
        overrides=tuple(set or ()),
        engines_of=engines_of,
    )
    _show(*launch_evaluation(wanted), as_json=as_json)


def resume_evaluation(run: str, root: str, *, as_json: bool) -> None:
    """Go on with an evaluation, and print what it came to; exit code 3 when it is worse than it may be."""
    from milepost.flows.launch_evaluate import relaunch_evaluation

    _show(*relaunch_evaluation(run, root), as_json=as_json)


def _show(found: dict[str, Any], fallen: str, *, as_json: bool) -> None:
    from milepost.flows.launch_evaluate import show_evaluation

    if as_json:
        print(json.dumps(found))
    else:
        show_evaluation(found)
    if fallen:
        raise typer.Exit(FAULTY)
