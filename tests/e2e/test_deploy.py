"""Deployments on a real server, run by a real worker elsewhere: to the end, refused, cancelled, killed and paused.

And what the server does by itself meanwhile: alerts, evaluations on a schedule and of what is saved.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import psutil
import pytest
from prefect.client.schemas import filters
from prefect.states import Cancelling, Pending, Scheduled

from milepost.flows.automations import ensure_evaluation
from milepost.flows.failure import TERMINATED
from milepost.flows.left_pending import schedule_again
from milepost.flows.run_status import run_status
from milepost.storage import manifest, runs
from milepost.storage.evaluated import evaluated
from milepost.storage.lease import newest_fence
from milepost.storage.runs import RunFolder

from .site import MILEPOST, POOL, TINY, Site, living, opened, within

pytestmark = pytest.mark.slow

WATCHED: dict[str, Any] = {
    "eval": {"path": "prompts.jsonl@[0:4]", "every_steps": 1000},
    "checkpoint": {"every_steps": 1, "keep_last": 9},
    "alert": {"bounds": [{"metric": "rollout/reward", "below": 2.0}]},
}


def named(name: str) -> filters.FlowRunFilter:
    return filters.FlowRunFilter(name=filters.FlowRunFilterName(any_=[name]))


@pytest.fixture(scope="module")
def site(model_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with opened(model_dir, tmp_path_factory.mktemp("site")) as found:
        yield found


def test_a_form_is_filled_in_by_the_recipe_and_relative_paths_start_where_deploy_was_called(site: Site) -> None:
    found = site.client.read_deployment_by_name("train/tiny")
    assert found.parameters["data"]["rollout_batch_size"] == 4 and found.parameters["rollout"]["temperature"] == 1.0
    assert found.parameters["root"] == str(site.folder / "runs")
    assert found.description == "**Train by the recipe `tiny.yaml`.** Sums on fake engines."
    schema = found.parameter_openapi_schema
    assert schema and "run" not in schema.get("required", [])
    fields = schema["definitions"]["OptimizerSection"]["properties"]
    assert fields["lr"]["description"] == "Peak learning rate. More than 0; 1e-06 by default."


def test_deploying_twice_changes_nothing_that_somebody_set_meanwhile(site: Site) -> None:
    before = site.client.read_deployment_by_name("train/tiny")
    pool, limit = site.client.read_work_pool(POOL), "milepost-engines"
    command = [MILEPOST, "deploy", "--pool", POOL, "--recipe", "tiny.yaml", "--no-worker"]
    environment = {**os.environ, "PREFECT_API_URL": str(site.client.api_url).rstrip("/")}
    subprocess.run(command, check=True, cwd=site.folder, env=environment, timeout=120)
    after = site.client.read_deployment_by_name("train/tiny")
    assert after.id == before.id and after.parameter_openapi_schema == before.parameter_openapi_schema
    assert site.client.read_work_pool(POOL).concurrency_limit == pool.concurrency_limit == 8
    assert site.client.read_global_concurrency_limit_by_name(limit).limit == 2


@pytest.mark.parametrize(
    ("name", "parameters", "reason"),
    [
        ("train/train", {"optimizer": {"lrr": 1}}, "'lrr' was unexpected"),
        ("train/train", {"optimizer": {"lr": -1}}, "less than or equal to the minimum"),
        ("train/train", {"optimizer": {"decay_steps": 0}}, "less than or equal to the minimum"),
        ("train/train", {"reward": {"name": "exat"}}, "'exat' does not match"),
        ("train/tiny", {"rollout": {"shards": 1}}, "'max_new_tokens' is a required property"),
        ("train/train", {"optimizer": {"schedule": "cosin"}}, "not one of"),
        ("train/train", {"model": {"path": 3}}, "not of type 'string'"),
        ("train/train", {"stepz": 3}, "'stepz' was unexpected"),
        ("resume/resume", {}, "'run' is a required property"),
    ],
)
def test_a_wrong_value_is_refused_before_anything_starts(
    site: Site, name: str, parameters: dict[str, Any], reason: str
) -> None:
    answer = site.post(name, **parameters)
    assert answer.status_code == 409 and reason in answer.text


@pytest.mark.long
def test_a_worker_elsewhere_trains_to_the_end_and_replays_it(site: Site) -> None:
    trained = site.start("train/tiny")
    site.until(trained, "Completed")
    assert manifest.finished_steps(site.run(trained)) == [0, 1]
    replayed = site.start("replay/replay", run=site.run(trained).run_id)
    site.until(replayed, "Completed", "Failed")
    assert site.state(replayed) == "Completed"


def test_a_cancelled_run_ends_within_30_seconds_leaves_nothing_running_and_can_go_on(site: Site) -> None:
    flow_run = site.start("train/tiny", steps=100000)
    folder = site.trained(flow_run, 2)
    started = site.worker.children(recursive=True)
    assert len(started) > 5
    site.client.set_flow_run_state(flow_run, Cancelling())
    site.until(flow_run, "Cancelled", seconds=30)
    assert within(10, lambda: not living(started))
    states = [state.name for state in site.client.read_flow_run_states(flow_run)]
    assert run_status(folder).state == "cancelled"
    assert states[-2:] == ["Cancelling", "Cancelled"] and site.below(flow_run) <= {"Completed", "Cancelled"}
    assert site.client.read_global_concurrency_limit_by_name("milepost-engines").active_slots == 0
    done = len(manifest.finished_steps(folder))
    site.until(site.start("resume/resume", run=folder.run_id, steps=done + 1), "Completed")
    assert len(manifest.finished_steps(folder)) == done + 1


def test_a_run_that_is_cancelled_while_it_waits_for_engines_ends_and_takes_none(site: Site) -> None:
    limit = ["milepost-engines"]
    site.client.increment_concurrency_slots(names=limit, slots=2, mode="concurrency")
    try:
        flow_run = site.start("train/tiny")
        assert within(60, lambda: run_status(site.run(flow_run)).state == "queued")
        site.client.set_flow_run_state(flow_run, Cancelling())
        site.until(flow_run, "Cancelled", seconds=30)
        assert run_status(site.run(flow_run)).state == "cancelled"
    finally:
        site.client.release_concurrency_slots(names=limit, slots=2, occupancy_seconds=1.0)
    assert site.client.read_global_concurrency_limit_by_name(limit[0]).active_slots == 0


@pytest.mark.long
def test_a_run_without_a_worker_ends_by_itself_when_it_is_cancelled(site: Site) -> None:
    command = [MILEPOST, "train", "--config", "tiny.yaml", "--run", "typed", "--steps", "100000"]
    environment = {**os.environ, "PREFECT_API_URL": str(site.client.api_url)}
    folder = runs.run_folder(str(site.folder / "runs"), "typed")
    with subprocess.Popen(command, cwd=site.folder, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert within(120, lambda: len(manifest.finished_steps(folder)) >= 2)
        started = psutil.Process(process.pid).children(recursive=True)
        (flow_run,) = site.client.read_flow_runs(flow_run_filter=named("typed"))
        site.client.set_flow_run_state(flow_run.id, Cancelling())
        said = process.communicate(timeout=45)[1]
    assert process.returncode == TERMINATED and "milepost resume typed" in said and "Traceback" not in said
    assert site.state(flow_run.id) == "Cancelled"
    assert site.below(flow_run.id) <= {"Completed", "Cancelled", "Crashed"}  # where Prefect itself was interrupted
    assert run_status(folder).state == "cancelled" and within(10, lambda: not living(started))


@pytest.mark.long
def test_a_run_that_a_worker_had_taken_and_did_not_begin_is_scheduled_again(site: Site) -> None:
    client, later = site.client, datetime.now(UTC) + timedelta(hours=1)  # so that no worker takes it now
    deployment = client.read_deployment_by_name("train/tiny").id
    flow_run = client.create_flow_run_from_deployment(deployment, state=Scheduled(scheduled_time=later))
    client.set_flow_run_state(flow_run.id, Pending(name="Submitting"), force=True)
    assert schedule_again(client, POOL) == [], "its process may be about to begin"
    assert schedule_again(client, POOL, older_than_seconds=0) == [flow_run.name]
    site.until(flow_run.id, "Completed")


@pytest.mark.long
def test_a_run_whose_process_is_killed_is_shown_as_crashed_with_its_steps(site: Site) -> None:
    flow_run = site.start("train/tiny", steps=100000)
    site.trained(flow_run, 2)
    (process,) = site.worker.children()
    process.kill()
    site.until(flow_run, "Crashed", seconds=30)
    assert within(30, lambda: site.below(flow_run) <= {"Completed", "Crashed"})


@pytest.mark.long
def test_a_paused_run_gives_its_engines_back_and_resumes_where_it_stopped(site: Site) -> None:
    flow_run = site.start("train/tiny", steps=100000)
    folder = site.trained(flow_run, 2)
    started = site.worker.children(recursive=True)
    site.suspend(flow_run)
    assert within(30, lambda: not living(started)) and site.state(flow_run) == "Suspended"
    assert run_status(folder).state == "paused"
    assert site.below(flow_run) <= {"Completed", "Suspended"}, "nobody comes back to them after Cancel"
    done = len(manifest.finished_steps(folder))
    site.client.resume_flow_run(flow_run)
    site.trained(flow_run, done + 2)
    shown = site.steps(flow_run)
    assert {shown[f"step-{step}"] for step in range(done + 1)} == {"Completed"}, "each in its own place"
    site.client.set_flow_run_state(flow_run, Cancelling())
    site.until(flow_run, "Cancelled", seconds=30)
    assert within(30, lambda: site.below(flow_run) <= {"Completed", "Crashed", "Cancelled"})


@pytest.mark.long
def test_a_suspended_run_that_is_cancelled_on_its_page_is_cancelled_in_the_terminal_too(site: Site) -> None:
    flow_run = site.start("train/tiny", steps=100000)
    folder = site.trained(flow_run, 1)
    site.suspend(flow_run)
    assert within(30, lambda: run_status(folder).state == "paused")
    site.client.set_flow_run_state(flow_run, Cancelling())
    site.until(flow_run, "Cancelled", seconds=30)
    assert run_status(folder).state == "cancelled"


@pytest.mark.long
def test_a_run_that_is_resumed_in_the_middle_of_a_stage_waits_for_the_process_that_was_suspended(site: Site) -> None:
    flow_run = site.start("train/tiny", steps=1, rollout=TINY["rollout"] | {"function": "slow:turn"})
    site.until(flow_run, "Running")
    assert within(60, lambda: "step-0" in site.steps(flow_run))
    site.suspend(flow_run)
    site.client.resume_flow_run(flow_run)
    site.until(flow_run, "Completed", "Failed", "Crashed")
    assert (site.state(flow_run), site.steps(flow_run)) == ("Completed", {"step-0": "Completed"})
    assert newest_fence(site.run(flow_run).uri) == 2


@pytest.fixture(scope="module")
def run(site: Site) -> RunFolder:
    """Two steps, a checkpoint after each, of which the run itself has evaluated the last."""
    flow_run = site.start("train/tiny", **WATCHED)
    site.until(flow_run, "Completed")
    return site.run(flow_run)


def evaluations_of(run: RunFolder) -> list[str]:
    """What of a run has been evaluated by others, to the end."""
    root = run.uri.rpartition("/")[0]
    found = ((folder, evaluated(runs.load(folder))) for folder in runs.run_folders(root))
    return sorted(of.label for folder, of in found if of and of.run == run.run_id and manifest.finished_steps(folder))


@pytest.mark.long
def test_a_metric_beyond_its_bound_is_posted_to_the_webhook_once(site: Site, run: RunFolder) -> None:
    assert within(60, lambda: bool(site.alerts))
    alerts = [json.loads(body) for body in site.alerts]
    assert [(alert["run"], alert["metric"], alert["step"]) for alert in alerts] == [(run.run_id, "rollout/reward", 1)]
    assert alerts[0]["reason"].endswith("which is below 2") and alerts[0]["above"] is None


@pytest.mark.long
def test_a_schedule_evaluates_what_nobody_has_and_is_left_as_it_is_by_another_deploy(
    site: Site, run: RunFolder
) -> None:
    found = site.client.read_deployment_by_name("evaluate-new/evaluate-new")
    # The worker's own deploy, without the option, came after the one that asked for it.
    assert [(item.schedule.model_dump()["cron"], item.active) for item in found.schedules] == [("0 5 * * *", True)]
    of_it = filters.FlowRunFilter(deployment_id=filters.FlowRunFilterDeploymentId(any_=[found.id]))
    assert within(150, lambda: bool(site.client.read_flow_runs(flow_run_filter=of_it)))
    first = min(site.client.read_flow_runs(flow_run_filter=of_it), key=lambda item: str(item.expected_start_time))
    site.client.set_flow_run_state(first.id, Scheduled(), force=True)  # as if it were five o'clock
    site.until(first.id, "Completed", "Failed")
    assert site.state(first.id) == "Completed" and evaluations_of(run) == [f"{run.run_id}@1"]


@pytest.mark.long
def test_a_checkpoint_is_evaluated_when_it_is_saved(site: Site, run: RunFolder) -> None:
    evaluate = site.client.read_deployment_by_name("evaluate/evaluate").id
    ensure_evaluation(site.client, evaluate, active=True)
    site.until(site.start("resume/resume", run=run.run_id, steps=TINY["steps"] + 1), "Completed")
    assert within(120, lambda: f"{run.run_id}@3" in evaluations_of(run)), evaluations_of(run)
    ensure_evaluation(site.client, evaluate, active=False)
