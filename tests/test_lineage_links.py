"""What MLflow holds of a run against what its folder holds: fine-tuning, a run, a resumption with a change, a child."""

import asyncio
import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from milepost.flows.artifacts import artifact_key
from milepost.flows.lineage import answer, as_json
from milepost.flows.report_delivery import report_now
from milepost.flows.tracker import Tracker
from milepost.flows.train import train
from milepost.storage import manifest, runs
from milepost.storage.lineage import PARENT_MODEL, sqlite_uri
from milepost.storage.outbox import Courier, Outbox, Record
from milepost.storage.tables import TableRef, read_table
from milepost.storage.taught import SFT_RECORD

from .bench.made_run import MadeRun, make_run
from .test_train_fake import parameters, sections, trained

STEPS = 2


@pytest.fixture
def made(tmp_path: Path) -> MadeRun:
    return make_run(str(tmp_path), 3)


def courier(made: MadeRun, sent: list[str]) -> Courier:
    def send(record: Record) -> None:
        sent.append(record["id"])

    return Courier(Outbox(made.folder.outbox), send)


def test_a_step_whose_owner_was_killed_before_it_told_is_told_by_the_next(made: MadeRun) -> None:
    sent: list[str] = []
    first, second = courier(made, sent), courier(made, sent)
    Tracker(made.folder, "", first).step(manifest.load(made.folder, 0))
    tracker = Tracker(made.folder, "", second)
    tracker.catch_up(Outbox(made.folder.outbox).ids())
    second.start()
    assert second.stop().waiting == 0 and tracker.last_checkpoint == 3
    assert sent == [
        f"{kind}-{number + at:06d}" for number in range(3) for at, kind in enumerate(("step", "checkpoint"))
    ]


def client_of(root: Path) -> tuple[Any, str]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(sqlite_uri(str(root)))
    return client, client.get_experiment_by_name("milepost").experiment_id


def own(tags: dict[str, str]) -> dict[str, str]:
    return {name.removeprefix("milepost."): value for name, value in tags.items() if name.startswith("milepost.")}


def tables_in(run: Any) -> dict[str, tuple[str, str, int]]:
    found = {}
    for item in run.inputs.dataset_inputs:
        tags = {tag.key: tag.value for tag in item.tags}
        rows = json.loads(item.dataset.profile)["rows"]
        found[item.dataset.name] = (tags["milepost.uri"], tags["milepost.sha256"], rows)
    return found


def artifact(client: Any, run: Any, name: str) -> bytes:
    return Path(client.download_artifacts(run.info.run_id, name)).read_bytes()


def walked(client: Any, experiment: str, model: Any) -> dict[str, Any]:
    """All that MLflow knows of a checkpoint: from its model to its run, steps, attempts and what it began with."""
    tags = own(model.tags)
    run = client.get_run(client.get_run(model.source_run_id).data.tags["mlflow.parentRunId"])
    nested = client.search_runs([experiment], f"tags.`mlflow.parentRunId` = '{run.info.run_id}'")
    began = json.loads(artifact(client, run, "inputs.json"))
    version = int(tags["version"])
    steps = {int(own(item.data.tags)["step"]): item for item in nested if "milepost.step" in item.data.tags}
    again = {int(own(item.data.tags)["attempt"]): item for item in nested if "milepost.step" not in item.data.tags}
    return {
        "run": tags["run_id"],
        "uri": tags["uri"],
        "version": tags["weights_version"],
        "model": began["model"],
        "data": tables_in(run),
        "attempts": {number: attempt_of(item) for number, item in {1: run, **again}.items()},
        "steps": {number: step_of(item) for number, item in steps.items() if number < version},
        "parent": parent_of(client, experiment, model, began["weights"]),
    }


def attempt_of(run: Any) -> dict[str, Any]:
    tags = own(run.data.tags)
    names = ("commit", "diff_digest", "packages_digest", "parameters_digest")
    before = {name.removeprefix("before."): json.loads(value) for name, value in tags.items() if "before." in name}
    changes = {name: [value, json.loads(run.data.params[name])] for name, value in before.items()}
    return {name: tags[name] for name in names} | {"changes": changes}


def step_of(run: Any) -> dict[str, Any]:
    tags = own(run.data.tags)
    return {
        "manifest": tags["manifest"],
        "version_in": tags["weights_version_in"],
        "version_out": tags["weights_version_out"],
        "attempt": int(tags["attempt"]),
        "parameters_digest": tags["parameters_digest"],
        "graders": json.loads(tags["graders"]),
        "taken": json.loads(tags["taken"]),
        "tables": tables_in(run),
    }


def parent_of(client: Any, experiment: str, model: Any, weights: dict[str, Any]) -> dict[str, Any]:
    """The checkpoint of another run that the chain of checkpoints ends in, else what the weights came from."""
    run = model.tags["milepost.run_id"]
    while PARENT_MODEL in model.tags:
        model = client.get_logged_model(model.tags[PARENT_MODEL])
        if model.tags["milepost.run_id"] != run:
            return walked(client, experiment, model)
    return weights


def stored(found: dict[str, Any]) -> dict[str, Any]:
    """What `milepost lineage --json` says, in the form of `walked`: prompts are in the tables that both name."""
    if "kind" in found:
        return found
    data = {name: ref for name, ref in found["data"].items() if isinstance(ref, dict) and "uri" in ref}
    return {
        **{name: found[name] for name in ("run", "uri", "version", "model")},
        "data": {name: (ref["uri"], ref["digest"], ref["rows"]) for name, ref in data.items()},
        "attempts": {item.pop("number"): item for item in found["attempts"]},
        "steps": {item.pop("step"): item | {"tables": tables_of(item)} for item in found["steps"]},
        "parent": stored(found["parent"]),
    }


def tables_of(step: dict[str, Any]) -> dict[str, tuple[str, str, int]]:
    return {f"{ref['slot']}/{ref['name']}": (ref["uri"], ref["digest"], ref["rows"]) for ref in step["tables"]}


@pytest.fixture(scope="module")
def family(
    tmp_path_factory: pytest.TempPathFactory, model_dir: str, prefect_server: str, ray_cluster: None
) -> Iterator[Path]:
    """A root with `first`, fine-tuned before and resumed with a change, and `second`, which began with its weights."""
    base = tmp_path_factory.mktemp("family")
    root, tuned, prompts = base / "runs", base / "tuned", base / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{n}+1=", "label": str(n + 1)}) + "\n" for n in range(16)))
    shutil.copytree(model_dir, tuned / "model")
    (tuned / SFT_RECORD).write_text(json.dumps({"model": model_dir, "steps": 7, "batches": ["ab" * 32]}))
    told = ["tracking.enabled=true", "checkpoint.every_steps=1", "rollout.shards=2"]
    first = parameters(str(tuned / "model"), str(prompts), *told)
    folder = trained("first", root, first, steps=STEPS)
    changed = parameters(str(tuned / "model"), str(prompts), *told, "optimizer.lr=3e-6")
    again = sections(changed) | {"allow_change": ("optimizer.lr",)}
    asyncio.run(train(run="first", root=str(root), steps=STEPS + 1, **again))
    shutil.copytree(model_dir, folder.weights(STEPS + 1), dirs_exist_ok=True)
    trained("second", root, parameters(folder.weights(STEPS + 1), str(prompts), *told), steps=STEPS)
    yield root


@pytest.mark.slow
def test_every_link_of_a_checkpoint_is_in_mlflow_as_in_the_run_folders(family: Path) -> None:
    client, experiment = client_of(family)
    (model,) = client.search_logged_models(
        [experiment], f"tags.`milepost.run_id` = 'second' AND tags.`milepost.version` = '{STEPS}'"
    )
    found = as_json(answer(f"checkpoint:second@{STEPS}", str(family)))
    expected = json.loads(json.dumps(stored(found)))
    assert json.loads(json.dumps(walked(client, experiment, model))) == expected
    assert expected["parent"]["run"] == "first" and expected["parent"]["parent"]["kind"] == "sft"
    assert expected["parent"]["attempts"]["2"]["changes"]["optimizer.lr"] == [1e-6, 3e-6]
    assert {item["attempt"] for item in expected["parent"]["steps"].values()} == {1, 2}


@pytest.mark.slow
def test_the_prompts_of_a_checkpoint_are_in_the_tables_that_mlflow_names(family: Path) -> None:
    client, experiment = client_of(family)
    found = answer(f"checkpoint:first@{STEPS + 1}", str(family))
    served: dict[str, list[int]] = {}
    for step in range(STEPS + 1):
        (run,) = client.search_runs([experiment], f"attributes.run_name = 'first/step-{step:06d}'")
        uri, digest, rows = tables_in(client.get_run(run.info.run_id))["sample-r0/prompts"]
        for prompt in read_table(TableRef(uri, rows, digest, "prompts"))["prompt_id"].to_pylist():
            served.setdefault(prompt, []).append(step)
    assert served == {item["prompt_id"]: item["steps"] for item in asdict(found)["prompts"]}


@pytest.mark.slow
def test_the_report_is_an_artifact_of_the_run_and_stays_one(family: Path) -> None:
    client, experiment = client_of(family)
    (run,) = client.search_runs([experiment], "attributes.run_name = 'second'")
    folder = runs.run_folder(str(family), "second")
    assert artifact(client, run, "report.html") == Path(folder.report).read_bytes()
    Path(folder.report).unlink()
    report_now(str(family), "second")
    assert artifact(client, run, "report.html") == Path(folder.report).read_bytes()
    assert [item.path for item in client.list_artifacts(run.info.run_id)] == ["inputs.json", "report.html", "run.json"]
    assert client.get_run(run.info.run_id).info.status == "FINISHED"


@pytest.mark.slow
def test_prefect_shows_the_report_once_on_the_page_of_each_flow_run(family: Path) -> None:
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey

    key, file = artifact_key("first", "report"), artifact_key("first", "report-file")
    with get_client(sync_client=True) as client:
        found = client.read_artifacts(artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=[key, file])))
    pages = {item.flow_run_id for item in found if str(family) in item.data}  # other roots have a run of this name
    shown = [item for item in found if item.flow_run_id in pages]
    assert len(shown) == 4 and len({(item.key, item.flow_run_id) for item in shown}) == 4
    newest = max((item for item in shown if item.key == key), key=lambda item: item.created)
    assert f"| steps | {STEPS + 1} of {STEPS + 1} |" in newest.data and "data:image/svg+xml;base64," in newest.data
    assert any(runs.run_folder(str(family), "first").report in item.data for item in shown)
