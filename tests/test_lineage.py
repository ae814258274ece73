"""What a run looks like in MLflow: a real sqlite store, a real server, and a port where nothing listens."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from milepost.flows import launches, service_state
from milepost.storage import lineage_records as records
from milepost.storage.lineage import PARENT_MODEL, UID, Lineage, artifact_location, sqlite_uri
from milepost.storage.lineage_names import NAME_CHARACTERS, aliases, flatten, legal_name
from milepost.storage.outbox import Courier, Delivery, DeliveryFailed, Outbox, Record, RecordRefused, deliver
from milepost.storage.parameters import Parameters
from milepost.storage.tables import TableRef

ROLLOUTS = TableRef("/runs/demo/rollouts.parquet", 8, "ab" * 32, "rollouts")
METRICS = {"reward": 0.5, "timing(s)/gen": 1.0, "eval/aime/pass@1": 0.25, "a#b": 1.0, "a//b": 2.0, "loss": float("nan")}


def story(run: str = "demo", steps: int = 2) -> list[Record]:
    """The records of a run with a checkpoint after every step."""
    told = [records.run_record(run, parameters=Parameters().model_dump(mode="json"), tags={"commit": "c0ffee"})]
    for step in range(steps):
        tags = {"weights_version_in": f"{step}-aa", "weights_version_out": f"{step + 1}-bb", "flow_run_id": "f1"}
        told.append(records.step_record(run, step, metrics=METRICS, tables={"rollouts": ROLLOUTS}, tags=tags))
        told.append(
            records.checkpoint_record(
                run,
                step + 1,
                uri=f"/runs/{run}/checkpoints/{step + 1}",
                weights_version=f"{step + 1}-bb",
                step=step,
                parent=step or None,
                tables=[ROLLOUTS],
            )
        )
    return [*told, records.end_record(run, "FINISHED")]


def send_all(lineage: Lineage, uri: str, told: list[Record], *, target: str = "mlflow") -> Delivery:
    outbox = Outbox(uri)
    for record in told:
        outbox.append(record)
    return deliver(outbox, lineage.send, target=target)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[Lineage, str]:
    """A lineage over sqlite that a run of two steps was sent to, and the outbox it came from."""
    root = tmp_path_factory.mktemp("runs")
    lineage = Lineage(sqlite_uri(str(root)))
    delivery = send_all(lineage, f"{root}/demo/outbox", story())
    assert (delivery.waiting, delivery.refused) == (0, ())
    return lineage, f"{root}/demo/outbox"


def client_of(lineage: Lineage) -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(lineage.tracking_uri)


def found_run(lineage: Lineage, name: str) -> Any:
    client = client_of(lineage)
    experiment = client.get_experiment_by_name(lineage.experiment).experiment_id
    run = client.search_runs([experiment], f"attributes.run_name = '{name}'")[0]
    return client.get_run(run.info.run_id)


def test_the_run_has_short_parameters_the_whole_configuration_and_its_commit(told: tuple[Lineage, str]) -> None:
    lineage, _ = told
    run = found_run(lineage, "demo")
    assert run.info.status == "FINISHED"
    assert run.data.params["data.seed"] == "0" and run.data.params["rollout.function"] == "single_turn"
    assert run.data.tags["milepost.run_id"] == "demo" and run.data.tags["mlflow.source.git.commit"] == "c0ffee"
    stored = json.loads((Path(run.info.artifact_uri.removeprefix("file://")) / "run.json").read_text())
    assert stored == Parameters().model_dump(mode="json")


def test_each_step_is_nested_in_the_run_with_its_versions_and_tables(told: tuple[Lineage, str]) -> None:
    lineage, _ = told
    step = found_run(lineage, "demo/step-000001")
    assert step.data.tags["mlflow.parentRunId"] == found_run(lineage, "demo").info.run_id
    assert step.data.tags["milepost.weights_version_in"] == "1-aa"
    dataset = step.inputs.dataset_inputs[0].dataset
    assert dataset.name == "rollouts" and dataset.digest == ROLLOUTS.digest[:36]
    assert json.loads(dataset.source) == {"uri": ROLLOUTS.uri, "sha256": ROLLOUTS.digest}


def test_the_run_has_a_curve_of_every_metric(told: tuple[Lineage, str]) -> None:
    lineage, _ = told
    run = found_run(lineage, "demo")
    history = client_of(lineage).get_metric_history(run.info.run_id, "reward")
    assert [(point.step, point.value) for point in history] == [(0, 0.5), (1, 0.5)]


def test_a_metric_that_mlflow_refuses_keeps_its_real_name_in_a_tag(told: tuple[Lineage, str]) -> None:
    lineage, _ = told
    run = found_run(lineage, "demo")
    real = {tag.removeprefix("milepost.alias."): name for tag, name in run.data.tags.items() if ".alias." in tag}
    assert sorted(real.values()) == ["a#b", "a//b", "eval/aime/pass@1", "timing(s)/gen"]
    assert {real.get(name, name) for name in run.data.metrics} == (set(METRICS) - {"loss"}) | {"nonfinite_metrics"}


def test_a_metric_that_is_not_finite_is_counted_and_said_but_not_logged(told: tuple[Lineage, str]) -> None:
    lineage, _ = told
    step = found_run(lineage, "demo/step-000000")
    assert "loss" not in step.data.metrics
    assert step.data.metrics["nonfinite_metrics"] == 1 and step.data.tags["milepost.nonfinite.loss"] == "nan"


def test_checkpoints_name_the_one_before_them_back_to_the_first(told: tuple[Lineage, str]) -> None:
    lineage, _ = told
    client = client_of(lineage)
    experiment = client.get_experiment_by_name(lineage.experiment).experiment_id
    models = {model.tags["milepost.version"]: model for model in client.search_logged_models([experiment])}
    assert models["2"].tags[PARENT_MODEL] == models["1"].model_id and PARENT_MODEL not in models["1"].tags
    assert models["2"].tags["milepost.table.0"] == ROLLOUTS.digest
    step = found_run(lineage, "demo/step-000001")
    assert [output.model_id for output in step.outputs.model_outputs] == [models["2"].model_id]
    assert [given.model_id for given in step.inputs.model_inputs] == [models["1"].model_id]


def test_sending_everything_again_changes_nothing(told: tuple[Lineage, str]) -> None:
    lineage, outbox = told
    before = found_run(lineage, "demo/step-000001").to_dictionary()
    again = Lineage(lineage.tracking_uri)
    assert deliver(Outbox(outbox), again.send, target="again").waiting == 0
    assert found_run(lineage, "demo/step-000001").to_dictionary() == before
    client = client_of(lineage)
    experiment = client.get_experiment_by_name(lineage.experiment).experiment_id
    assert len(client.search_runs([experiment], f"tags.`{UID}` LIKE '{Outbox(outbox).uid}%'")) == 3
    history = client.get_metric_history(found_run(lineage, "demo").info.run_id, "reward")
    assert len(history) == 2


def test_a_new_run_of_an_old_name_is_another_run_there(told: tuple[Lineage, str], tmp_path: Path) -> None:
    lineage, _ = told
    changed = Parameters().model_dump(mode="json") | {"optimizer": {"lr": 1.0}}
    record = records.run_record("demo", parameters=changed, tags={}, parent_run="older")
    assert send_all(lineage, str(tmp_path), [record]).sent == 1
    client = client_of(lineage)
    experiment = client.get_experiment_by_name(lineage.experiment).experiment_id
    runs = client.search_runs([experiment], "attributes.run_name = 'demo'")
    assert {run.data.params["optimizer.lr"] for run in runs} == {"1e-06", "1.0"}
    client.delete_run(next(run.info.run_id for run in runs if run.data.params["optimizer.lr"] == "1.0"))


def test_a_resumed_run_is_running_again_until_it_ends(told: tuple[Lineage, str], tmp_path: Path) -> None:
    lineage, _ = told
    begin = records.run_record("again", parameters={}, tags={})
    send_all(lineage, str(tmp_path), [begin, records.end_record("again", "FAILED", reason="out of disk")])
    assert found_run(lineage, "again").info.status == "FAILED"
    send_all(lineage, str(tmp_path), [records.resume_record("again")])
    assert found_run(lineage, "again").info.status == "RUNNING"


def test_an_attempt_is_nested_in_the_run_with_what_it_changed(told: tuple[Lineage, str], tmp_path: Path) -> None:
    lineage, _ = told
    begun = records.run_record("changed", parameters=Parameters().model_dump(mode="json"), tags={})
    went_on = records.attempt_record("changed", 2, {"optimizer.lr": (1e-6, 2e-6)}, tags={"attempt": 2})
    assert send_all(lineage, f"{tmp_path}/outbox", [begun, went_on]).refused == ()
    attempt, run = found_run(lineage, "changed/attempt-000002"), found_run(lineage, "changed")
    assert attempt.data.tags["mlflow.parentRunId"] == run.info.run_id and run.info.status == "RUNNING"
    assert attempt.data.params == {"optimizer.lr": "2e-06"} and run.data.params["optimizer.lr"] == "1e-06"
    assert attempt.data.tags["milepost.before.optimizer.lr"] == "1e-06"


def test_text_that_mlflow_or_a_database_cannot_hold_does_not_fail_a_run(
    told: tuple[Lineage, str], tmp_path: Path
) -> None:
    lineage, _ = told
    odd = {"section": {"long": "x" * 9000, "broken": "\ud800", "a!b": [1, 2], "": None}}
    begin = records.run_record("odd", parameters=odd, tags={"note": "y" * 9000, "broken": "\udfff"})
    step = records.step_record("odd", 0, metrics={"\ud800": 1, "": 2, "..": 3, "z" * 300: 4}, tables={}, tags={})
    delivery = send_all(lineage, str(tmp_path), [begin, step])
    assert (delivery.sent, delivery.refused, delivery.error) == (2, (), "")
    assert len(found_run(lineage, "odd").data.params["section.long"]) == 500


def test_a_record_that_makes_no_sense_is_refused_by_name(told: tuple[Lineage, str]) -> None:
    lineage, _ = told
    with pytest.raises(RecordRefused, match="unknown kind of record 'stpe'"):
        lineage.send({"kind": "stpe", "id": "x"})
    with pytest.raises(RecordRefused, match="'parameters'"):
        lineage.send({"kind": "run", "id": "run", "uid": "u/run", "run_id": "r", "time_ms": 0})


def test_a_server_that_is_down_loses_nothing_and_the_run_goes_on(told: tuple[Lineage, str], tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        uri = f"http://127.0.0.1:{closed.getsockname()[1]}"
        courier = Courier(Outbox(str(tmp_path)), Lineage(uri).send)
        courier.start()
        assert all(courier.post(record) for record in story("patient", steps=1))
        assert courier.stop(timeout_seconds=30).waiting == 4
    assert deliver(Outbox(str(tmp_path)), told[0].send).sent == 4
    assert found_run(told[0], "patient").info.status == "FINISHED"


def test_a_tracking_uri_that_means_nothing_keeps_the_records(tmp_path: Path) -> None:
    with pytest.raises(DeliveryFailed, match="nonsense://x"):
        Lineage("nonsense://x").send(records.run_record("r", parameters={}, tags={}) | {"uid": "u/run"})


def test_a_deleted_experiment_is_named_with_the_remedy(told: tuple[Lineage, str]) -> None:
    uri = told[0].tracking_uri
    client = client_of(told[0])
    client.delete_experiment(client.create_experiment("gone"))
    with pytest.raises(DeliveryFailed, match="'gone' is deleted: restore it"):
        Lineage(uri, experiment="gone").send(records.run_record("r", parameters={}, tags={}) | {"uid": "u/run"})


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("MILEPOST_HOME", str(tmp_path / "state"))
    launch = launches.mlflow_launch(str(tmp_path / "root"))
    service, process = service_state.launch(
        launch.name, launch.command, url=launch.url, environment=launch.environment, dies_with_parent=True
    )
    while not service_state.answers(launch.probe):
        assert process.poll() is None, service_state.last_words(service)
    yield launch.url
    service_state.stop(service)
    process.wait()


@pytest.mark.slow
def test_a_server_takes_a_run_and_the_database_beside_it_goes_on_with_it(
    server: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    outbox = str(tmp_path / "root" / "demo" / "outbox")
    lineage = Lineage(server)
    assert send_all(lineage, outbox, story()).waiting == 0
    run_id = found_run(lineage, "demo").info.run_id
    assert lineage.report_page(Outbox(outbox).uid).endswith(f"/runs/{run_id}/artifacts/report.html")
    assert lineage.report_page("another") == ""
    assert capfd.readouterr() == ("", "")
    direct = Lineage(sqlite_uri(str(tmp_path / "root")))
    resumed = [records.resume_record("demo"), records.step_record("demo", 2, metrics={"reward": 1}, tables={}, tags={})]
    assert send_all(direct, outbox, resumed).sent == 2
    run = found_run(direct, "demo")
    assert run.data.metrics["reward"] == 1 and run.info.status == "RUNNING"
    assert Path(run.info.artifact_uri.removeprefix("file://")).is_relative_to(tmp_path / "root" / "mlartifacts")


@given(st.text())
def test_every_name_becomes_one_that_mlflow_takes(name: str) -> None:
    from mlflow.utils.validation import _validate_metric_name

    legal = legal_name(name)
    _validate_metric_name(legal)
    assert len(legal) <= NAME_CHARACTERS and legal_name(legal) == legal
    assert aliases([name]) == ({} if legal == name else aliases([name]))


@given(st.lists(st.text(alphabet="a/#!. _", max_size=6), unique=True))
def test_different_names_stay_different(names: list[str]) -> None:
    assert len({legal_name(name) for name in names}) == len(names)


def test_sections_are_flattened_to_dotted_names() -> None:
    assert dict(flatten({"a": {"b": 1, "c": {"d": True}}, "e": "text", "f": {}})) == {
        "a.b": "1",
        "a.c.d": "true",
        "e": "text",
        "f": "{}",
    }


def test_a_database_has_no_page_of_a_report(told: tuple[Lineage, str]) -> None:
    lineage, outbox = told
    assert lineage.report_page(Outbox(outbox).uid) == ""


def test_artifacts_lie_beside_a_local_database_and_where_a_server_says() -> None:
    assert artifact_location("sqlite:////runs/mlflow.db") == "/runs/mlartifacts"
    assert artifact_location("http://127.0.0.1:5000") is None


def test_the_best_checkpoint_has_a_tag_that_the_one_before_loses(told: tuple[Lineage, str], tmp_path: Path) -> None:
    lineage, _ = told
    saved = [
        records.checkpoint_record("better", number, uri=f"/c/{number}", weights_version=f"{number}-a", step=number - 1)
        for number in (1, 2)
    ]
    best = [records.best_record("better", number, metric="held-out accuracy", value=number / 4) for number in (1, 2)]
    begin = records.run_record("better", parameters={}, tags={})
    steps = [records.step_record("better", step, metrics={}, tables={}, tags={}) for step in (0, 1)]
    assert send_all(lineage, f"{tmp_path}/outbox", [begin, *steps, *saved, *best]).refused == ()
    client = client_of(lineage)
    experiment = client.get_experiment_by_name(lineage.experiment).experiment_id
    models = client.search_logged_models([experiment], "tags.`milepost.run_id` = 'better'")
    assert {model.name: model.tags.get("milepost.best") for model in models} == {
        "better-v1": None,
        "better-v2": "held-out accuracy 0.5",
    }
    assert found_run(lineage, "better").data.tags["milepost.best_checkpoint"] == "2"
