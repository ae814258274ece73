"""The command line. Errors are one sentence on stderr: exit code 2 for bad input, 1 for a run that failed."""

import faulthandler
import json
import os
import signal
import sys
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console
from typer.exceptions import TyperException

from milepost.flows.cli_convert import convert_app
from milepost.flows.cli_data import data_app
from milepost.flows.cli_deploy import deploy_app
from milepost.flows.cli_evaluate import evaluate_app, resume_evaluation
from milepost.flows.cli_grade import grade_app
from milepost.flows.cli_options import AsJson, Overrides, Root, RunName, print_done, print_values
from milepost.flows.cli_router import router_app
from milepost.flows.cli_sft import sft_app
from milepost.flows.cli_stored import stored_app
from milepost.flows.cli_watch import watch_app
from milepost.flows.failure import TERMINATED, RunFailed, sentence
from milepost.flows.recipe import DEFAULT_ROOT, absolute_root

INTERRUPTED = 130  # what typer returns for KeyboardInterrupt

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="RL post-training of language models as a durable workflow.",
)

Config = Annotated[
    str | None, typer.Option("--config", "-c", help="Recipe: a YAML file, or the name of a shipped one.")
]
Steps = Annotated[int | None, typer.Option(help="Trips around the DAG (default: 10).")]
Run = Annotated[str | None, typer.Option("--run", help="Name of the run (default: the recipe's name and the time).")]
AllowChange = Annotated[
    list[str] | None, typer.Option(help="Parameter, as section.field, that may differ from how the run began.")
]


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
    from milepost.flows.plan import make_plan, notices
    from milepost.flows.plan_numbers import describe
    from milepost.flows.progress import say
    from milepost.flows.recipe import request

    wanted = request(config, set or [], run=run, root=root, steps=steps)
    made = make_plan(wanted.run, wanted.root, wanted.steps, wanted.parameters)
    for notice in notices(made):
        say(notice)
    found = describe(made)
    if as_json:
        print(json.dumps(found))
    else:
        print_values(found, "plan")


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
    print_done(launch(wanted, allowed=allow_change or []), as_json)


@app.command()
def resume(
    run: RunName,
    root: Root = None,
    steps: Annotated[int | None, typer.Option(help="Trips around the DAG in all, if other than before.")] = None,
    set: Overrides = None,
    allow_change: AllowChange = None,
    as_json: AsJson = False,
) -> None:
    """Go on with a run at its first unfinished stage: nothing is generated, graded or applied twice."""
    from milepost.flows.evaluation_results import is_evaluation
    from milepost.flows.launch import relaunch
    from milepost.storage.runs import run_folder

    folder = absolute_root(root or DEFAULT_ROOT)
    if is_evaluation(run_folder(folder, run)):
        resume_evaluation(run, folder, as_json=as_json)
        return
    print_done(relaunch(run, folder, steps=steps, overrides=set or [], allowed=allow_change or []), as_json)


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


# After the commands above, so that help begins with what people begin with.
app.add_typer(deploy_app)
app.add_typer(evaluate_app)
app.add_typer(sft_app)
app.add_typer(convert_app)
app.add_typer(watch_app)
app.add_typer(stored_app)
app.add_typer(grade_app)
app.add_typer(router_app)
app.add_typer(data_app, name="data")


def _exit_code(error: BaseException) -> int:
    bad_input = isinstance(error, ValueError | LookupError | OSError | ImportError)
    return 2 if bad_input and not isinstance(error, RunFailed) else 1


def _terminate(number: int, frame: FrameType | None) -> None:
    """Leave in good order: what is running ends, and what is committed stands."""
    raise SystemExit(TERMINATED)


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
    faulthandler.register(signal.SIGUSR1)  # `kill -USR1 PID` shows where every thread of a command is
    sys.path.append(os.getcwd())  # a person's own `module:function` lies beside where the command is typed
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"] or ["--help"]
    sys.exit(_run(arguments, debug="--debug" in sys.argv))
