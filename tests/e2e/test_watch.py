"""A run as people watch it, on fake engines: DAG, logs and page in Prefect, and the same in the terminal."""

import asyncio
import json
import logging
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from prefect.logging.handlers import APILogWorker

from milepost.flows.artifacts import Artifact, Artifacts, artifact_key
from milepost.flows.log_view import chosen
from milepost.flows.polling import polled
from milepost.flows.run_detail import run_detail
from milepost.flows.sql import query
from milepost.flows.train import resume, train
from milepost.storage import runs
from milepost.storage.runs import RunFolder
from tests.test_cli import MILEPOST
from tests.test_train_fake import parameters, sections

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect_server", "ray_cluster")]

PROCESSES = {"flow", "rollout-0", "router", "train-0"}


@dataclass(frozen=True)
class Watched:
    """A run of two attempts, and where Prefect has it."""

    api: str
    folder: RunFolder
    flow_runs: list[str]

    def ask(self, path: str, **body: Any) -> Any:
        answer = httpx.post(f"{self.api}{path}", json=body, timeout=30)
        answer.raise_for_status()
        return answer.json()

    def of_runs(self, path: str, **filters: Any) -> Any:
        return self.ask(path, flow_runs={"id": {"any_": self.flow_runs}}, limit=200, **filters)

    def edges(self, flow_run: str) -> dict[str, set[str]]:
        """The nodes of a flow run's graph, and those that each follows."""
        nodes = dict(httpx.get(f"{self.api}/flow_runs/{flow_run}/graph-v2", timeout=30).json()["nodes"])
        return {node["label"]: {nodes[to["id"]]["label"] for to in node["parents"]} for node in nodes.values()}


@pytest.fixture(scope="module")
def watched(prefect_server: str, tmp_path_factory: pytest.TempPathFactory, model_dir: str) -> Watched:
    root = tmp_path_factory.mktemp("watched")
    rows = [{"prompt": f"{number}+1=", "label": str(number + 1)} for number in range(16)]
    prompts = root / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    chosen = parameters(model_dir, str(prompts), "eval.every_steps=1", f"eval.path={prompts}@[:2]")
    asyncio.run(train(run="Watched", root=str(root), steps=2, **sections(chosen)))
    asyncio.run(resume(run="Watched", root=str(root), steps=3))
    APILogWorker.drain_all(timeout=30)
    found = httpx.post(
        f"{prefect_server}/flow_runs/filter",
        json={"flow_runs": {"name": {"any_": ["Watched"]}}, "sort": "START_TIME_ASC"},
    )
    return Watched(prefect_server, runs.run_folder(str(root), "Watched"), [run["id"] for run in found.json()])


def test_the_graph_of_a_run_has_the_edges_of_the_loop_and_no_other(watched: Watched) -> None:
    found = watched.edges(watched.flow_runs[0])
    assert found["iteration / step-1"] == {"iteration / step-0"}
    assert found["iteration / step-0"] == set()
    after = {name: parents for name, parents in found.items() if name.startswith("evaluate-")}
    assert list(after.values()) == [set()] * 3, "Prefect's pages show no task that waits for a flow"


def test_the_graph_of_a_step_is_the_dag(watched: Watched) -> None:
    (step,) = watched.ask(
        "/flow_runs/filter",
        flow_runs={"parent_flow_run_id": {"any_": watched.flow_runs[:1]}, "name": {"any_": ["step-0"]}},
    )
    found = watched.edges(step["id"])
    assert len(found) == 15
    assert found["generate-0.1"] == {"sample-0"} and found["score-0.1"] == {"generate-0.1"}
    assert found["optimize"] == {f"filter-0.{shard}" for shard in range(4)}
    assert found["sync-1"] == {"optimize"}


def test_a_step_has_no_copy_of_the_parameters_which_are_with_the_run(watched: Watched) -> None:
    steps = watched.ask("/flow_runs/filter", flow_runs={"parent_flow_run_id": {"any_": watched.flow_runs[:1]}})
    (run,) = watched.ask("/flow_runs/filter", flow_runs={"id": {"any_": watched.flow_runs[:1]}})
    assert [step["parameters"]["given"] for step in steps] == [{}, {}]
    assert run["parameters"]["engines"]["train"] == "fake"


def test_what_every_process_says_is_in_the_log_of_the_flow_run(watched: Watched) -> None:
    wanted = {"flow_run_id": {"any_": watched.flow_runs[:1]}}
    found = watched.ask("/logs/filter", logs=wanted, limit=200)
    messages = {log["name"]: log["message"] for log in reversed(found)}
    assert set(messages) >= PROCESSES
    assert messages["train-0"].startswith("loaded its model in")
    assert messages["rollout-0"].startswith("serves ")
    assert len(found) < 60


def test_requests_are_in_the_routers_file_for_whoever_asks_for_details(watched: Watched) -> None:
    def said(level: str) -> list[str]:
        entries = chosen(watched.folder, process="router", level=level, follow=False)
        return [entry.message for entry in entries if '"sample"' in entry.message]

    asked = query([watched.folder], "select sample_id from rollouts").num_rows
    assert said("info") == [] and len(said("debug")) >= asked


def test_a_page_has_one_artifact_of_each_kind_an_attempt(watched: Watched) -> None:
    found = watched.of_runs("/artifacts/filter")
    names = ("progress", "steps", "reward", "samples")
    keys = [artifact["key"] for artifact in found]
    assert [keys.count(artifact_key("Watched", name)) for name in names] == [2, 2, 2, 2]
    assert len({artifact["id"] for artifact in found}) == len(found)


def test_the_page_shows_where_the_run_stands(watched: Watched) -> None:
    found = {artifact["key"]: artifact for artifact in watched.of_runs("/artifacts/latest/filter")}
    progress, steps, reward, samples = (
        found[artifact_key("Watched", name)] for name in ("progress", "steps", "reward", "samples")
    )
    assert progress["data"] == 100.0 and progress["description"].startswith("3 of 3 steps")
    assert [row["step"] for row in json.loads(steps["data"])] == ["2", "1", "0"]
    assert "![reward by step](data:image/svg+xml;base64," in reward["data"]
    rows = json.loads(samples["data"])
    assert {row["kind"] for row in rows} == {"worst", "best"}
    assert rows[0]["sample"].startswith("`000002-") and rows[0]["prompt"] and rows[0]["label"]
    assert "milepost show Watched --root" in samples["description"]


def test_the_terminal_shows_the_same(watched: Watched) -> None:
    root = str(Path(watched.folder.uri).parent)
    found = run_detail(watched.folder, root)
    assert (found.status.state, found.status.done) == ("finished", 3)
    assert found.status.accuracy is not None
    told = subprocess.run(
        [MILEPOST, "logs", "Watched", "--root", root, "-f"], capture_output=True, text=True, timeout=60
    )
    assert told.returncode == 0, told.stderr
    assert {line.split()[3] for line in told.stdout.splitlines()} == PROCESSES
    assert sum("serves" in line for line in told.stdout.splitlines()) == 2, "both attempts"


def test_an_artifact_is_changed_in_place_and_comes_back_when_it_was_deleted(watched: Watched) -> None:
    shown = Artifacts("Changed", watched.flow_runs[0])
    for percent in (1.0, 2.0, 2.0):
        shown.show([Artifact("progress", "progress", percent)])
    (one,) = watched.ask("/artifacts/filter", artifacts={"key": {"any_": [artifact_key("Changed", "progress")]}})
    assert one["data"] == 2.0
    httpx.delete(f"{watched.api}/artifacts/{one['id']}").raise_for_status()
    shown.show([Artifact("progress", "progress", 3.0)])
    (again,) = watched.ask("/artifacts/filter", artifacts={"key": {"any_": [artifact_key("Changed", "progress")]}})
    assert again["data"] == 3.0


def test_a_page_that_cannot_be_shown_costs_nothing_but_itself(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise httpx.ConnectError("gone")

    begun = time.monotonic()
    with caplog.at_level(logging.DEBUG, logger="milepost"), polled(fail, 0.01):
        time.sleep(0.1)
    assert time.monotonic() - begun < 1
    assert "ConnectError: gone" in caplog.text
