"""The command line. Errors are one sentence on stderr: exit code 2 for bad input, 1 for a run that failed."""

import json
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from typer.exceptions import TyperException

from milepost.flows.failure import RunFailed, sentence
from milepost.flows.recipe import DEFAULT_ROOT, absolute_root

FAULTY = 3  # `verify` found something wrong
INTERRUPTED = 130  # what typer returns for KeyboardInterrupt

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="RL post-training of language models as a durable workflow.",
)
data_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Make prompt sets.")
app.add_typer(data_app, name="data")

Config = Annotated[
    str | None, typer.Option("--config", "-c", help="Recipe: a YAML file, or the name of a shipped one.")
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", "-s", help="Override, as section.field=value; repeatable.")
]
Root = Annotated[str | None, typer.Option(help="Folder of all runs (default: runs).")]
Steps = Annotated[int | None, typer.Option(help="Trips around the DAG (default: 10).")]
Run = Annotated[str | None, typer.Option("--run", help="Name of the run (default: the recipe's name and the time).")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
AllowChange = Annotated[
    list[str] | None, typer.Option(help="Parameter, as section.field, that may differ from how the run began.")
]
RunName = Annotated[str, typer.Argument(help="Name of the run.")]


def _rows(values: dict[str, Any], title: str) -> None:
    table = Table(title=title, show_header=False, title_justify="left")
    for name, value in values.items():
        table.add_row(name, f"{value:,}" if isinstance(value, int) else str(value))
    Console().print(table)


def _done(summary: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(summary))
    else:
        _rows(summary, "done")


@app.command()
def plan(
    config: Config = None,
    set: Overrides = None,
    run: Run = None,
    root: Root = None,
    steps: Steps = None,
    as_json: AsJson = False,
) -> None:
    """Check a run and print every number that follows from its parameters, without starting anything."""
    from milepost.flows.plan import describe, make_plan
    from milepost.flows.recipe import request

    wanted = request(config, set or [], run=run, root=root, steps=steps)
    found = describe(make_plan(wanted.run, wanted.root, wanted.steps, wanted.parameters))
    if as_json:
        print(json.dumps(found))
    else:
        _rows(found, "plan")


@app.command()
def train(
    config: Config = None,
    set: Overrides = None,
    run: Run = None,
    root: Root = None,
    steps: Steps = None,
    allow_change: AllowChange = None,
    as_json: AsJson = False,
) -> None:
    """Train a model, or go on with the run of this name: sample, generate, score, filter, optimize, sync."""
    from milepost.flows.launch import launch
    from milepost.flows.recipe import request

    wanted = request(config, set or [], run=run, root=root, steps=steps)
    _done(launch(wanted, allowed=allow_change or []), as_json)


@app.command()
def resume(
    run: RunName,
    root: Root = None,
    steps: Annotated[int | None, typer.Option(help="Trips around the DAG in all, if other than before.")] = None,
    allow_change: AllowChange = None,
    as_json: AsJson = False,
) -> None:
    """Go on with a run at its first unfinished stage: nothing is generated, graded or applied twice."""
    from milepost.flows.launch import relaunch

    _done(relaunch(run, absolute_root(root or DEFAULT_ROOT), steps=steps, allowed=allow_change or []), as_json)


@app.command()
def demo(
    root: Root = None,
    seed: Annotated[int, typer.Option(help="Seed of everything.")] = 0,
    steps: Annotated[int | None, typer.Option(help="GRPO steps.")] = None,
    as_json: AsJson = False,
) -> None:
    """Warm up a tiny model on arithmetic and train it by GRPO through the whole DAG, in minutes on two cores."""
    from milepost.flows.demo import run_demo, show

    result = run_demo(root or DEFAULT_ROOT, seed=seed, steps=steps)
    if as_json:
        print(json.dumps(result.summary()))
    else:
        show(result)


@app.command()
def up(root: Root = None) -> None:
    """Start a Prefect server, an MLflow server and a Ray head on loopback, and print their addresses."""
    from milepost.flows import services

    services.up(absolute_root(root or DEFAULT_ROOT))


@app.command()
def down() -> None:
    """Stop what `up` started, and nothing else."""
    from milepost.flows import services

    services.down()


@app.command()
def doctor(root: Root = None, model: Annotated[str | None, typer.Option(help="Model path to check.")] = None) -> None:
    """Check this machine, and print a fix for everything that would get in the way."""
    from milepost.flows.doctor import diagnose, render

    checks = diagnose(root or DEFAULT_ROOT, model)
    Console().print(render(checks))
    if not all(check.ok for check in checks):
        raise typer.Exit(1)


@app.command()
def sql(run: RunName, statement: str, root: Root = None, as_json: AsJson = False) -> None:
    """Query the rollouts of a run: `rollouts` is the table of all its samples."""
    from milepost.flows.sql import query
    from milepost.storage import attempts, runs

    folder = runs.run_folder(root or DEFAULT_ROOT, run)
    attempts.current(folder)
    columns, rows = query(folder, statement)
    if as_json:
        print(json.dumps([dict(zip(columns, row, strict=True)) for row in rows], default=str))
        return
    table = Table(*columns)
    for row in rows:
        table.add_row(*(str(value) for value in row))
    Console().print(table)


@app.command()
def verify(run: RunName, root: Root = None, as_json: AsJson = False) -> None:
    """Work out every digest, sum and link of a run again; exit code 3 and a list when something is wrong."""
    from milepost.flows.audit import audit, show

    found = audit(root or DEFAULT_ROOT, run)
    show(found, as_json=as_json)
    if found.faults:
        raise typer.Exit(FAULTY)


@app.command()
def report(run: RunName, root: Root = None) -> None:
    """Write the report of a run, finished or not, and print where it is."""
    from milepost.flows.report import write_report
    from milepost.storage import runs

    print(write_report(runs.run_folder(root or DEFAULT_ROOT, run)))


@app.command()
def grade(
    reward: Annotated[str, typer.Argument(help="Reward: a built-in, an entry point, or pkg.mod:fn.")],
    response: Annotated[str, typer.Option(help="Response to grade, or @file.")],
    label: Annotated[str, typer.Option(help="Label, as JSON or plain text.")] = "null",
    as_json: AsJson = False,
) -> None:
    """Grade one response, and print the verdict."""
    from dataclasses import asdict

    from milepost.flows.recipe import json_or_text
    from milepost.tasks.rewards import grade as grade_response

    text = Path(response[1:]).read_text() if response.startswith("@") else response
    verdict = asdict(grade_response(reward, text, json_or_text(label)))
    if as_json:
        print(json.dumps(verdict))
    else:
        _rows(verdict, "verdict")


@data_app.command("reasoning-gym")
def reasoning_gym(
    task: Annotated[str, typer.Option(help="Task of reasoning-gym, such as chain_sum.")],
    out: Annotated[str, typer.Option(help="File to write: .parquet or .jsonl.")],
    size: Annotated[int, typer.Option(help="Prompts.")] = 1000,
    seed: Annotated[int, typer.Option(help="Seed of the task's generator.")] = 0,
) -> None:
    """Prompts of a reasoning-gym task, with what its verifier needs."""
    from milepost.flows.data import make_reasoning_gym

    _rows(vars(make_reasoning_gym(task, size, seed, out)), "written")


@data_app.command("arithmetic")
def arithmetic(
    out: Annotated[str, typer.Option(help="File to write: .parquet or .jsonl.")],
    size: Annotated[int, typer.Option(help="Prompts.")] = 1000,
    seed: Annotated[int, typer.Option(help="Seed of the choice and the order.")] = 0,
    split: Annotated[str, typer.Option(help="train or held_out: no problem is in both.")] = "train",
    digits: Annotated[int, typer.Option(help="Digits of the operands.")] = 2,
    operators: Annotated[str, typer.Option(help="Some of + - *.")] = "+-*",
) -> None:
    """Arithmetic problems such as 12+7=, with answers as labels."""
    from milepost.flows.data import make_arithmetic, split_of

    _rows(
        vars(make_arithmetic(size, seed, out=out, split=split_of(split), digits=digits, operators=operators)), "written"
    )


def _exit_code(error: BaseException) -> int:
    bad_input = isinstance(error, ValueError | LookupError | OSError | ImportError)
    return 2 if bad_input and not isinstance(error, RunFailed) else 1


def _terminate(number: int, frame: FrameType | None) -> None:
    """Leave in good order: what is running ends, and what is committed stands."""
    raise SystemExit(0)


def _run(arguments: list[str], *, debug: bool) -> int:
    """The exit code of a command; whatever stops it has become a sentence on stderr."""
    try:
        code = app(args=arguments, prog_name="milepost", standalone_mode=False) or 0
        problem = "interrupted, everything this command started has ended" if code == INTERRUPTED else ""
    except TyperException as error:
        problem, code = error.format_message(), 2
    except Exception as error:  # the last stop before a person: any failure becomes a sentence
        if debug:
            raise
        problem, code = sentence(error), _exit_code(error)
    if problem:
        print(f"milepost: {problem}", file=sys.stderr)
    return int(code)


def main() -> None:
    """Run a command; every failure is one sentence, and --debug shows its traceback. SIGTERM ends in good order."""
    signal.signal(signal.SIGTERM, _terminate)
    sys.path.append(os.getcwd())  # a person's own `module:function` lies beside where the command is typed
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"] or ["--help"]
    sys.exit(_run(arguments, debug="--debug" in sys.argv))
