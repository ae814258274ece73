"""A run from the command line: checked first, then trained against a Prefect server that is there or is started."""

import asyncio
from typing import Any

from milepost.flows.failure import RunFailed, sentence
from milepost.flows.plan import make_plan
from milepost.flows.progress import say
from milepost.flows.recipe import Request
from milepost.flows.report import evaluations, finished
from milepost.flows.services import prefect_api
from milepost.flows.train import train
from milepost.storage import files, runs
from milepost.storage.runs import RunFolder


def check(request: Request) -> RunFolder:
    """Refuse, before any server is started, what the flow would refuse."""
    folder = runs.run_folder(request.root, request.run)
    runs.require_new(folder)
    make_plan(request.run, request.root, request.steps, request.parameters)
    return folder


def launch(request: Request) -> dict[str, Any]:
    """Train, and return what there is to say of the finished run."""
    folder = check(request)
    sections = {name: getattr(request.parameters, name) for name in type(request.parameters).model_fields}
    with prefect_api(say=say, console_level="CRITICAL"):
        try:
            asyncio.run(train(run=request.run, root=request.root, steps=request.steps, **sections))
        except Exception as error:  # whatever stopped a run that had begun is told as such, with its cause
            if files.exists(folder.record):
                raise RunFailed(f"run {request.run!r} failed: {sentence(error)}") from error
            raise
    return summary(folder)


def summary(folder: RunFolder) -> dict[str, Any]:
    """The run in a few values: where it is, how far it came, first and last reward, held-out accuracy."""
    steps = finished(folder)
    rewards = [step.metrics.get("rollout/reward") for step in steps]
    found = {f"accuracy@{item.step}": round(item.mean, 4) for item in evaluations(folder)}
    return {
        "run": folder.run_id,
        "folder": folder.uri,
        "steps": len(steps),
        "first_reward": rewards[0] if rewards else None,
        "last_reward": rewards[-1] if rewards else None,
        "checkpoint": next((step.checkpoint for step in reversed(steps) if step.checkpoint), ""),
        "report": folder.report,
        **found,
    }
