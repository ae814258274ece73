"""The deployments of a Prefect server: what its pages offer to run, in a pool of processes of this machine."""

import importlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.resources import files as package_files
from pathlib import Path
from typing import Any
from uuid import UUID

import yaml
from prefect import Flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import (
    DeploymentScheduleCreate,
    DeploymentUpdate,
    GlobalConcurrencyLimitCreate,
    GlobalConcurrencyLimitUpdate,
    WorkPoolCreate,
    WorkPoolUpdate,
)
from prefect.client.schemas.objects import ConcurrencyLimitConfig
from prefect.client.schemas.schedules import CronSchedule
from prefect.deployments.runner import EntrypointType, RunnerDeployment
from prefect.exceptions import ObjectNotFound
from prefect.workers.process import ProcessWorker

from milepost.flows.automations import cron_schedule, ensure_alert, ensure_evaluation, kept_schedules
from milepost.flows.engine_slots import machine_slots
from milepost.flows.form import run_form
from milepost.flows.left_pending import schedule_again
from milepost.flows.progress import say
from milepost.flows.recipe import load_recipe, recipe_path
from milepost.flows.train import train
from milepost.storage.parameters import EnginesSection

AnyFlow = Flow[..., Any]

POOL_TYPE = "process"
EVALUATE_NEW = "evaluate-new/evaluate-new"
DEFAULT_RUNS = 8


@dataclass(frozen=True)
class Wishes:
    """What the server is to do by itself. None, and an empty address, leave what there is."""

    evaluate_saved: bool | None = None
    evaluate_every: CronSchedule | None = None
    webhook: str = ""


def deploy(
    pool: str,
    root: str,
    recipes: Sequence[str],
    *,
    runs: int | None = None,
    slots: int | None = None,
    wishes: Wishes = Wishes(),
) -> dict[str, UUID]:
    """Register every deployment, or bring it up to date, and return their full names and ids.

    Relative paths of a run start from the current directory. The pool has at most `runs` flow runs at a time, and those
    whose engines together need more than `slots` GPUs, or cores where there are none, take turns; None changes neither.
    What somebody has set on the pages stays as it is.
    """
    wanted = [*_plain(root), *(_of_recipe(name, root) for name in recipes)]
    found = {}
    with get_client(sync_client=True) as client:
        _ensure_pool(client, pool, runs)
        _ensure_limit(client, EnginesSection().pool, slots)
        for flow, deployment in wanted:
            deployment.schedules = _schedules(client, deployment, wishes)
            found[deployment.full_name] = deployment.apply(work_pool_name=pool)
            form = run_form(flow, deployment.parameters)
            client.update_deployment(found[deployment.full_name], DeploymentUpdate(parameter_openapi_schema=form))
        for name in schedule_again(client, pool):
            say(f"flow run {name!r} was left by a worker that is gone, and is scheduled again")
        _automate(client, found, wishes)
    return found


def _schedules(
    client: SyncPrefectClient, deployment: RunnerDeployment, wishes: Wishes
) -> list[DeploymentScheduleCreate]:
    """Those that are wished for, else those that are there, else those of `prefect.yaml`."""
    if deployment.full_name == EVALUATE_NEW and wishes.evaluate_every:
        return [DeploymentScheduleCreate(schedule=wishes.evaluate_every, active=True)]
    kept = kept_schedules(client, deployment.full_name)
    return list(deployment.schedules or []) if kept is None else kept


def _automate(client: SyncPrefectClient, found: Mapping[str, UUID], wishes: Wishes) -> None:
    if wishes.evaluate_saved is not None:
        ensure_evaluation(client, found["evaluate/evaluate"], active=wishes.evaluate_saved)
    if wishes.webhook:
        ensure_alert(client, wishes.webhook)


def _plain(root: str) -> Iterator[tuple[AnyFlow, RunnerDeployment]]:
    """The deployments of `prefect.yaml`."""
    path = Path(str(package_files("milepost.deployments"))) / "prefect.yaml"
    for entry in yaml.safe_load(path.read_text())["deployments"]:
        module, _, name = entry["entrypoint"].rpartition(".")
        flow = getattr(importlib.import_module(module), name)
        given = {name: entry[name] for name in ("tags", "description", "concurrency_limit") if name in entry}
        flow, made = _deployment(flow, entry["name"], {"root": root}, **given)
        for item in entry.get("schedules", []):
            schedule = DeploymentScheduleCreate(schedule=cron_schedule(item["cron"]), active=item["active"])
            made.schedules = [*(made.schedules or []), schedule]
        yield flow, made


def _of_recipe(name: str, root: str) -> tuple[AnyFlow, RunnerDeployment]:
    """`train` with a form that a recipe has filled in: every field that is not empty, as Prefect merges no sections."""
    parameters, values = load_recipe(name, [])
    path = recipe_path(name)
    sections = parameters.model_dump(mode="json", exclude_none=True)
    comment = "\n".join(line.removeprefix("#").removeprefix(" ") for line in _head(path))
    return _deployment(
        train,
        path.stem,
        {**sections, "root": values.get("root", root), "steps": int(values.get("steps", 10))},
        tags=["milepost", "train", "recipe"],
        description=f"**Train by the recipe `{path.name}`.** {comment}",
    )


def _head(path: Path) -> Iterator[str]:
    """The comment that a recipe begins with."""
    for line in path.read_text().splitlines():
        if not line.startswith("#"):
            return
        yield line


def _deployment(
    flow: AnyFlow,
    name: str,
    parameters: dict[str, Any],
    *,
    tags: list[str],
    description: str,
    concurrency_limit: dict[str, Any] | None = None,
) -> tuple[AnyFlow, RunnerDeployment]:
    found = flow.to_deployment(
        name,
        parameters=parameters,
        tags=tags,
        description=description,
        version=version("milepost"),
        concurrency_limit=ConcurrencyLimitConfig(**concurrency_limit) if concurrency_limit else None,
        # With a command Prefect looks for no project in the folder, and signals the process of the flow alone, which
        # ends what it has started; without, it signals a group that Ray is in.
        job_variables={"working_dir": os.getcwd(), "command": f"{sys.executable} -m prefect.engine"},
        entrypoint_type=EntrypointType.MODULE_PATH,
    )
    assert isinstance(found, RunnerDeployment)
    return flow, found


def _ensure_pool(client: SyncPrefectClient, name: str, runs: int | None) -> None:
    try:
        pool = client.read_work_pool(name)
    except ObjectNotFound:
        template = ProcessWorker.get_default_base_job_template()
        limit = runs or DEFAULT_RUNS
        client.create_work_pool(
            WorkPoolCreate(name=name, type=POOL_TYPE, base_job_template=template, concurrency_limit=limit)
        )
        return
    if pool.type != POOL_TYPE:
        raise ValueError(f"work pool {name!r} is of type {pool.type!r}, runs need {POOL_TYPE!r}: choose another --pool")
    if runs is not None and pool.concurrency_limit != runs:
        client.update_work_pool(name, WorkPoolUpdate(concurrency_limit=runs))


def _ensure_limit(client: SyncPrefectClient, name: str, slots: int | None) -> None:
    try:
        found = client.read_global_concurrency_limit_by_name(name)
    except ObjectNotFound:
        limit = slots or machine_slots()
        client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=name, limit=limit))
        return
    if slots is not None and found.limit != slots:
        client.update_global_concurrency_limit(name, GlobalConcurrencyLimitUpdate(limit=slots))
