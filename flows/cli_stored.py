"""Commands on stored runs: check them, ask them, run them again."""

import json
from dataclasses import asdict
from typing import Annotated

import typer

from milepost.flows.cli_options import FAULTY, AsJson, Overrides, Root, RunName, print_rows, print_values
from milepost.flows.recipe import DEFAULT_ROOT, absolute_root

stored_app = typer.Typer(rich_markup_mode=None)

StepRange = Annotated[str, typer.Option("--steps", help="Finished steps, as a:b (default: all).")]


@stored_app.command()
def verify(run: RunName, root: Root = None, as_json: AsJson = False) -> None:
    """Work out every digest, sum and link of a run again; exit code 3 and a list when something is wrong."""
    from milepost.flows.audit import audit, show

    found = audit(root or DEFAULT_ROOT, run)
    show(found, as_json=as_json)
    if found.faults:
        raise typer.Exit(FAULTY)


@stored_app.command()
def replay(
    run: RunName,
    root: Root = None,
    steps: StepRange = "",
    first: Annotated[
        str, typer.Option("--from", help="First stage: score, filter or optimize; with --into also generate.")
    ] = "score",
    into: Annotated[str, typer.Option(help="Keep what is made as a new run of this name.")] = "",
    set: Overrides = None,
    tolerance: Annotated[
        float | None, typer.Option(help="How far numbers may deviate (default: 0, GPUs 0.05).")
    ] = None,
    out: Annotated[str, typer.Option(help="With --set: a Parquet file for the rows.")] = "",
    as_json: AsJson = False,
) -> None:
    """Run stored stages again, and compare every output with the stored one: exit code 3 when one differs.

    With --set, tell what would have been otherwise under other rewards, filters or algorithms; with --into and --set,
    make a run of it.
    """
    from milepost.flows import launch_replay as again

    if into:
        place = absolute_root(root or DEFAULT_ROOT)
        made = again.keep(run, place, into, steps=steps, first=first, overrides=set or [], tolerance=tolerance)
        again.show_kept(made, as_json=as_json)
        if made.get("verdict") == "different":
            raise typer.Exit(FAULTY)
        return
    if set:
        found = again.ask(run, absolute_root(root or DEFAULT_ROOT), set, steps=steps, out=out)
        again.show_changes(found, as_json=as_json)
        return
    judged = again.judge(run, absolute_root(root or DEFAULT_ROOT), steps=steps, first=first, tolerance=tolerance)
    again.show_verdict(judged, as_json=as_json)
    if judged["verdict"] == "different":
        raise typer.Exit(FAULTY)


@stored_app.command()
def regrade(
    run: RunName,
    root: Root = None,
    reward: Annotated[str | None, typer.Option(help="Reward (default: the run's own, as it is now).")] = None,
    options: Annotated[str, typer.Option(help="The reward's options, as a JSON object.")] = "{}",
    timeout: Annotated[float, typer.Option(help="Seconds that one sample may take.")] = 10.0,
    steps: StepRange = "",
    threshold: Annotated[float, typer.Option(help="Score from which a sample counts as right.")] = 0.5,
    max_flips: Annotated[float | None, typer.Option(help="Exit code 3 when more percent flip.")] = None,
    as_json: AsJson = False,
) -> None:
    """Score all stored samples once more: who is judged otherwise, and the reward curves, old and new."""
    import asyncio

    from milepost.flows.regrading import regrade_run, render, section

    chosen = section(reward, options, timeout)
    found = asyncio.run(regrade_run(run, root or DEFAULT_ROOT, reward=chosen, steps=steps, threshold=threshold))
    if as_json:
        print(json.dumps(asdict(found) | {"flip_percent": found.flip_percent}))
    else:
        render(found)
    if max_flips is not None and found.flip_percent > max_flips:
        raise typer.Exit(FAULTY)


@stored_app.command()
def lineage(
    what: Annotated[
        str, typer.Argument(help="checkpoint:RUN@STEP, checkpoint:RUN@best, prompt:ID, sample:ID or sample:RUN/ID.")
    ],
    root: Root = None,
    mermaid: Annotated[bool, typer.Option(help="Print the picture of it as Mermaid text.")] = False,
    as_json: AsJson = False,
) -> None:
    """Where a checkpoint comes from, or which steps, checkpoints and runs a prompt or sample has touched."""
    from milepost.flows import lineage as found

    answer = found.answer(what, root or DEFAULT_ROOT)
    if as_json:
        print(json.dumps(found.as_json(answer)))
    elif mermaid:
        from milepost.flows.lineage_picture import mermaid as picture

        print(picture(answer))
    else:
        found.show(answer)


@stored_app.command()
def sql(
    run: RunName,
    statement: str,
    root: Root = None,
    runs: Annotated[str, typer.Option(help="More runs, as a pattern of names such as 'demo-*'.")] = "",
    out: Annotated[str, typer.Option(help="Write the rows to a .csv, .json or .parquet file instead.")] = "",
    as_json: AsJson = False,
) -> None:
    """Query stored runs: rollouts, batches, learnt, prompts, steps, verdicts, drops and metrics are tables of them."""
    from milepost.flows.sql import as_rows, chosen_runs, query, write

    result = query(chosen_runs(root or DEFAULT_ROOT, run, runs), statement)
    if out:
        write(result, out)
    elif as_json:
        print(json.dumps(result.to_pylist(), default=str))
    else:
        print_rows(*as_rows(result))


@stored_app.command()
def export(
    run: RunName,
    out: Annotated[str, typer.Option(help="File to write: .jsonl or .parquet.")],
    root: Root = None,
    steps: StepRange = "",
    kept: Annotated[bool, typer.Option("--kept", help="Only what was trained on.")] = False,
    no_tokens: Annotated[bool, typer.Option("--no-tokens", help="Text without token ids and their numbers.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a file that is there.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write the samples of a run as rows that others read: messages, tokens, log-probabilities, reward, versions."""
    from milepost.flows.export import export as write
    from milepost.storage import runs

    folder = runs.run_folder(root or DEFAULT_ROOT, run)
    done = asdict(write(folder, out, steps=steps, kept=kept, tokens=not no_tokens, overwrite=overwrite))
    if as_json:
        print(json.dumps(done))
    else:
        print_values(done, "exported")


@stored_app.command()
def show(
    run: RunName,
    sample: Annotated[str, typer.Option(help="Id of the sample.")],
    root: Root = None,
    as_json: AsJson = False,
) -> None:
    """One sample: prompt, response, every token with its log-probability and mask, verdict and versions."""
    from milepost.flows.sample_view import find_sample, show_sample

    row = find_sample(root or DEFAULT_ROOT, run, sample)
    if as_json:
        print(json.dumps(row, default=str))
    else:
        show_sample(row)


@stored_app.command()
def purge(
    run: RunName,
    prompt: Annotated[list[str], typer.Option(help="Id of a prompt; repeatable.")],
    root: Root = None,
    runs: Annotated[str, typer.Option(help="More runs, as a pattern of names such as 'demo-*'.")] = "",
    reason: Annotated[str, typer.Option(help="Why, for the record of the purge.")] = "",
    force: Annotated[bool, typer.Option("--force", help="Also where the run cannot go on afterwards.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be replaced, and replace nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Take prompts and all that was answered to them out of stored runs; ids, rewards and counts stay."""
    from milepost.flows import purge as purging
    from milepost.flows.sql import chosen_runs

    place = absolute_root(root or DEFAULT_ROOT)
    chosen = purging.holders(chosen_runs(place, run, runs), prompt)
    others = purging.others_with(place, chosen, prompt)
    found = purging.purge_runs(place, chosen, reason=reason, force=force, dry_run=dry_run)
    if as_json:
        print(json.dumps(purging.as_json(found, others, dry_run=dry_run)))
    else:
        purging.show(found, others, dry_run=dry_run)


@stored_app.command()
def report(run: RunName, root: Root = None) -> None:
    """Write the report of a run, finished or not, and print where it is; MLflow and Prefect have it too."""
    from milepost.flows.report_delivery import report_now

    print(report_now(absolute_root(root or DEFAULT_ROOT), run))
