"""A run from the command line: checked first, then worked on against a Prefect server that is there or is started."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

from prefect.exceptions import Abort, TerminationSignal

from milepost.flows.boundary import require_checkpoint
from milepost.flows.failure import TERMINATED, RunFailed, first_cause, sentence
from milepost.flows.outcome import watched
from milepost.flows.parents import going_on
from milepost.flows.plan import make_plan
from milepost.flows.progress import say
from milepost.flows.ray_cluster import joined_ray
from milepost.flows.recipe import Request, parameters_of, with_overrides
from milepost.flows.results import evaluations, finished
from milepost.flows.run_status import resume_command
from milepost.flows.services import prefect_api
from milepost.flows.start import is_finished, require_allowed, require_resumable
from milepost.flows.train import resume, train
from milepost.flows.view import is_unreported
from milepost.storage import files, runs, stops
from milepost.storage.parameters import Parameters
from milepost.storage.runs import RunFolder, RunRecord

R = TypeVar("R")


def check(request: Request, allowed: Sequence[str]) -> RunFolder:
    """Refuse, before any server is started, what the flow would refuse."""
    folder = runs.run_folder(request.root, request.run)
    if files.exists(folder.record):
        record = require_resumable(folder, request.steps)
        chosen = going_on(request.parameters, record)
        require_allowed(record, chosen, allowed)
        require_checkpoint(folder, record, chosen)
        _require_secrets(folder, record, chosen)
    else:
        runs.require_new(folder)
        make_plan(request.run, request.root, request.steps, request.parameters)
    return folder


def launch(request: Request, *, allowed: Sequence[str] = ()) -> dict[str, Any]:
    """Train, and return what there is to say of the run."""
    folder = check(request, allowed)
    sections = {name: getattr(request.parameters, name) for name in type(request.parameters).model_fields}
    work(
        folder,
        request.root,
        lambda: train(run=request.run, root=request.root, steps=request.steps, allow_change=tuple(allowed), **sections),
    )
    return summary(folder)


def _require_secrets(folder: RunFolder, record: RunRecord, parameters: Parameters) -> None:
    """What a run that goes on needs and does not store."""
    if not is_finished(folder, record):
        parameters.resolved(going_on=True)


def relaunch(
    run: str, root: str, *, steps: int | None, overrides: Sequence[str] = (), allowed: Sequence[str] = ()
) -> dict[str, Any]:
    """Go on with a run, with other values or the secrets that it does not store; return what there is to say of it."""
    folder = runs.run_folder(root, run)
    record = require_resumable(folder, steps)
    if overrides:
        chosen = parameters_of(with_overrides(record.parameters.model_dump(), list(overrides)))
        return launch(Request(run, root, record.steps, chosen), allowed=allowed)
    _require_secrets(folder, record, record.parameters)
    work(folder, root, lambda: resume(run=run, root=root, steps=steps, allow_change=tuple(allowed)))
    return summary(folder)


def work(
    folder: RunFolder,
    root: str,
    begin: Callable[[], Coroutine[Any, Any, R]],
    *,
    kind: str = "run",
    as_it_is: tuple[type[Exception], ...] = (),
    ray: bool = True,
) -> R:
    """What a flow that works on `folder` returned. Once its record is there, whatever ends it says how to go on.

    RunFailed for an error, unless it is one of `as_it_is`.
    """
    hint = f"resume with: {resume_command(folder, root)}"
    with serving(ray=ray):
        try:
            return run_flow(begin)
        except as_it_is:
            raise
        except Exception as error:  # whatever stopped a run that had begun is told as such, with its cause
            if files.exists(folder.record):
                raise RunFailed(f"{kind} {folder.run_id!r} stopped: {sentence(error)}; {hint}") from error
            raise
        except BaseException:  # Ctrl-C or SIGTERM: what is committed stands
            if files.exists(folder.record):
                say(hint)
            raise


@contextmanager
def serving(*, ray: bool = True) -> Iterator[None]:
    """What flows need: Prefect and `ray`, those that run or ones of this process's own, started side by side."""
    with orderly_end(), ExitStack() as joined:

        def join_ray() -> None:
            if ray:
                joined.enter_context(joined_ray())

        with prefect_api(say=say, console_level="CRITICAL", meanwhile=join_ray):
            yield


def run_flow(begin: Callable[[], Coroutine[Any, Any, R]]) -> R:
    """What a flow returned; how its body ended counts, and not that Prefect could not be told."""
    with watched() as outcome:
        try:
            return asyncio.run(begin())
        except Exception as error:  # Prefect raises what the flow raised, and beside it errors of its own
            if not is_unreported(error):
                raise
            if isinstance(outcome.error, asyncio.CancelledError):
                raise KeyboardInterrupt from None
            if outcome.error:
                raise outcome.error from None
            if not outcome.done:
                raise
            say("the run ended well; Prefect was not told, because it did not answer")
            result: R = outcome.result
            return result


@contextmanager
def orderly_end() -> Iterator[None]:
    """SIGTERM, or Cancel on a page, during a flow, which Prefect knows as errors, ends this process with its code."""
    try:
        yield
    except BaseException as error:  # it may lie inside groups of what ran side by side when the signal came
        if isinstance(first_cause(error), TerminationSignal | Abort):
            raise SystemExit(TERMINATED) from None
        raise


def summary(folder: RunFolder) -> dict[str, Any]:
    """The run in a few values: where it is, how far it came, first and last reward, held-out accuracy."""
    steps = finished(folder)
    stop = stops.stop_after(folder, len(steps))
    rewards = [step.metrics.get("rollout/reward") for step in steps]
    found = {f"accuracy@{item.step}": round(item.mean, 4) for item in evaluations(folder)}
    return {
        "run": folder.run_id,
        "folder": folder.uri,
        "steps": len(steps),
        "first_reward": rewards[0] if rewards else None,
        "last_reward": rewards[-1] if rewards else None,
        "checkpoint": next((step.checkpoint for step in reversed(steps) if step.checkpoint), ""),
        **({"stopped": f"{stop.reason} ({stop.rule})"} if stop else {}),
        "report": folder.report,
        **found,
    }
