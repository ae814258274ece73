"""The index of runs in MLflow: what a record of storage/lineage_records.py becomes there.

Sending is idempotent: what is created carries the record's `uid` as a tag and is found by it the next time. It goes
through a client with explicit run ids, because MLflow's active run differs between threads. Only this file and
storage/lineage_entities.py know MLflow.
"""

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from milepost.storage import files
from milepost.storage import lineage_entities as entities
from milepost.storage.lineage_names import PREFIX, aliases, flatten, legal_name, model_name, own_tags
from milepost.storage.lineage_records import checkpoint_id, step_id
from milepost.storage.outbox import DeliveryFailed, Record, RecordRefused
from milepost.storage.redaction import masked_text

UID = PREFIX + "uid"
PARENT_MODEL = PREFIX + "parent_model_id"
INPUTS = "inputs.json"
REPORT = "report.html"


def sqlite_uri(folder: str) -> str:
    """The tracking URI of the database in a local folder."""
    return f"sqlite:///{Path(folder).absolute() / 'mlflow.db'}"


def artifact_location(tracking_uri: str) -> str | None:
    """Where artifacts go: beside a local database, or wherever a server says (None)."""
    if not tracking_uri.startswith("sqlite:///"):
        return None
    return str(Path(tracking_uri.removeprefix("sqlite:///")).absolute().parent / "mlartifacts")


def _unreachable() -> tuple[type[Exception], ...]:
    """What MLflow's client raises when its store or server cannot do something now."""
    import requests
    import sqlalchemy.exc
    from mlflow.exceptions import MlflowException

    return MlflowException, requests.RequestException, sqlalchemy.exc.SQLAlchemyError, OSError


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _open(tracking_uri: str) -> Any:
    """A client of `tracking_uri` that gives up soon, tells nobody about its use, and keeps off the terminal."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    from mlflow.tracking import MlflowClient

    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
    return MlflowClient(tracking_uri)


def _experiment(client: Any, name: str, location: str | None) -> str:
    """The id of an experiment, created when there is none."""
    found = client.get_experiment_by_name(name)
    if found is None:
        return str(client.create_experiment(name, artifact_location=location))
    if found.lifecycle_stage != "active":
        raise DeliveryFailed(f"MLflow experiment {name!r} is deleted: restore it or choose another tracking.experiment")
    return str(found.experiment_id)


class Lineage:
    """Sends records to one experiment. The first `send` imports and reaches MLflow, in whatever thread that is."""

    def __init__(self, tracking_uri: str, *, experiment: str = "milepost") -> None:
        self.tracking_uri = tracking_uri
        self.experiment = experiment
        self._client: Any = None
        self._experiment_id = ""
        self._runs: dict[str, str] = {}

    def send(self, record: Record) -> None:
        """Bring one record into MLflow; DeliveryFailed when it cannot be now, RecordRefused when it never can."""
        kinds = {
            "run": self._send_run,
            "resume": self._send_resume,
            "attempt": self._send_attempt,
            "step": self._send_step,
            "checkpoint": self._send_checkpoint,
            "end": self._send_end,
            "report": self._send_report,
            "evaluation": self._send_evaluation,
            "best": self._send_best,
        }
        if record.get("kind") not in kinds:
            raise RecordRefused(f"unknown kind of record {record.get('kind')!r}; known: {sorted(kinds)}")
        try:
            self._connect()
            kinds[record["kind"]](record)
        except _unreachable() as error:
            self._runs.clear()
            if self._client is not None and getattr(error, "error_code", "") == "INVALID_PARAMETER_VALUE":
                raise RecordRefused(f"record {record['id']!r}: {_first_line(error)}") from error
            raise DeliveryFailed(masked_text(f"MLflow at {self.tracking_uri}: {_first_line(error)}")) from error
        except (KeyError, TypeError, ValueError) as error:
            raise RecordRefused(
                masked_text(f"record {record.get('id')!r} cannot be sent to MLflow: {error!r}")
            ) from error

    def _connect(self) -> None:
        if self._client is None:
            client = _open(self.tracking_uri)
            self._experiment_id = _experiment(client, self.experiment, artifact_location(self.tracking_uri))
            self._client = client

    def _send_run(self, record: Record) -> None:
        run = self._run(record, "run")
        text = files.canonical_json(record["parameters"])
        params = dict(flatten(record["parameters"]))
        tags = own_tags(record["tags"] | {"parameters_sha256": files.digest_of(text.encode())}) | aliases(params)
        if record["parent_run"]:
            tags[PREFIX + "parent_run"] = record["parent_run"]
        if "commit" in record["tags"]:
            tags["mlflow.source.git.commit"] = record["tags"]["commit"]
        entities.log(self._client, run, tags=tags, params={legal_name(name): value for name, value in params.items()})
        self._client.log_dict(run, record["parameters"], "run.json")
        if record.get("inputs"):
            self._client.log_dict(run, record["inputs"], INPUTS)
        self._log_tables(run, record.get("tables", {}))

    def _send_resume(self, record: Record) -> None:
        self._client.update_run(self._run(record, "run"), status="RUNNING")

    def _send_attempt(self, record: Record) -> None:
        """A nested run whose parameters are the changed values, each with the value before as a tag."""
        run, parent = self._run(record, record["id"]), self._run(record, "run")
        now = dict(flatten({key: after for key, (_, after) in record["changes"].items()}))
        before = {f"before.{key}": json.dumps(value) for key, (value, _) in record["changes"].items()}
        tags = own_tags(record["tags"] | before) | aliases(now)
        entities.log(self._client, run, tags=tags, params={legal_name(name): value for name, value in now.items()})
        self._client.set_terminated(run, "FINISHED", end_time=record["time_ms"])
        entities.log(self._client, parent, tags=own_tags({"reason": ""}))  # for which it had ended
        self._client.update_run(parent, status="RUNNING")

    def _send_step(self, record: Record) -> None:
        run, parent = self._run(record, record["id"], step=record["step"]), self._run(record, "run")
        metrics = record["metrics"] | {"nonfinite_metrics": float(len(record["nonfinite"]))}
        nonfinite = {f"nonfinite.{name}": value for name, value in record["nonfinite"].items()}
        points = entities.points(metrics, record)
        entities.log(self._client, run, tags=own_tags(record["tags"] | nonfinite) | aliases(metrics), metrics=points)
        entities.log(self._client, parent, tags=aliases(metrics), metrics=points)
        self._log_tables(run, record["tables"])
        self._client.set_terminated(run, "FINISHED", end_time=record["time_ms"])

    def _send_checkpoint(self, record: Record) -> None:
        from mlflow.entities import LoggedModelInput, LoggedModelOutput

        run = self._run(record, step_id(record["step"]), step=record["step"])
        before = record.get("parent_uid", "")
        if record["parent"] is not None:
            before = _sibling(record, checkpoint_id(record["parent"]))
        parent = self._model(before) if before else None
        model = self._model(record["uid"]) or self._create_model(record, run, parent)
        self._client.finalize_logged_model(model, "READY")
        if parent:
            self._client.log_inputs(run, models=[LoggedModelInput(parent)])
        if model not in [output.model_id for output in self._client.get_run(run).outputs.model_outputs]:
            self._client.log_outputs(run, [LoggedModelOutput(model, record["step"])])

    def _send_end(self, record: Record) -> None:
        run = self._run(record, "run")
        if record["reason"]:
            entities.log(self._client, run, tags=own_tags({"reason": record["reason"]}))
        self._client.set_terminated(run, record["status"], end_time=record["time_ms"])

    def _send_best(self, record: Record) -> None:
        """A tag on the model, which no other one of the run keeps, and its version on the run."""
        run, best = self._run(record, "run"), f"{record['metric']} {record['value']:g}"
        marked = f"tags.`{UID}` LIKE '{_sibling(record, '%')}' AND tags.`{entities.BEST}` LIKE '%'"
        before = [found.model_id for found in self._client.search_logged_models([self._experiment_id], marked)]
        entities.mark_best(self._client, self._model(_sibling(record, checkpoint_id(record["version"]))), before, best)
        entities.log(self._client, run, tags=own_tags({"best_checkpoint": str(record["version"]), "best_metric": best}))

    def _send_report(self, record: Record) -> None:
        """The report as it is now: one that was written since is what is wanted."""
        try:
            page = files.read(record["uri"])
        except FileNotFoundError:
            raise RecordRefused(f"record {record['id']!r}: {record['uri']} is gone") from None
        run = self._run(record, "run")
        self._client.log_text(run, page.decode(), REPORT)
        entities.log(self._client, run, tags={PREFIX + "report_sha256": files.digest_of(page)})

    def report_page(self, uid: str) -> str:
        """Where MLflow's page shows the report of the run with the outbox `uid`.

        Empty where nobody serves that page, or not yet for this run; DeliveryFailed when the server does not say.
        """
        served = self.tracking_uri.startswith(("http://", "https://"))
        if not served or masked_text(self.tracking_uri) != self.tracking_uri:
            return ""
        try:
            self._connect()
            found = self._client.search_runs([self._experiment_id], f"tags.`{UID}` = '{uid}/run'", max_results=1)
        except _unreachable() as error:
            raise DeliveryFailed(masked_text(f"MLflow at {self.tracking_uri}: {_first_line(error)}")) from error
        place = f"{self.tracking_uri.rstrip('/')}/#/experiments/{self._experiment_id}/runs"
        return f"{place}/{found[0].info.run_id}/artifacts/{REPORT}" if found else ""

    def _send_evaluation(self, record: Record) -> None:
        """Scores on the evaluation's run and on the model that they are of, each with its data set."""
        from mlflow.entities import LoggedModelInput

        run, of = self._run(record, "run"), record["of"]
        model = self._model(of["uid"])
        if model is None and of["label"]:
            named = {"run_id": of["run"] or of["label"], "version": of["step"], "tables": []}
            model = self._create_model(of | named, run, None)
            self._client.finalize_logged_model(model, "READY")
        self._log_tables(run, {name: found["table"] for name, found in record["sets"].items()})
        if model is not None:
            self._client.log_inputs(run, models=[LoggedModelInput(model)])
        for name, found in record["sets"].items():
            points = entities.scores(found["metrics"], record, model, name, found["table"])
            entities.log(self._client, run, tags=aliases(found["metrics"]), metrics=points)

    def _log_tables(self, run: str, tables: Mapping[str, Any]) -> None:
        found = [entities.dataset(name, table) for name, table in tables.items()]
        if found:
            self._client.log_inputs(run, datasets=found)

    def _run(self, record: Record, name: str, *, step: int | None = None) -> str:
        """The MLflow run for the record called `name` in the outbox of `record`; a step's is nested in the run's."""
        uid = _sibling(record, name)
        if uid not in self._runs:
            found = self._client.search_runs([self._experiment_id], f"tags.`{UID}` = '{uid}'", max_results=1)
            self._runs[uid] = found[0].info.run_id if found else self._create_run(record, name, uid, step)
        return self._runs[uid]

    def _create_run(self, record: Record, name: str, uid: str, step: int | None) -> str:
        tags = {UID: uid, PREFIX + "run_id": record["run_id"]}
        title = record["run_id"]
        if name != "run":
            tags["mlflow.parentRunId"] = self._run(record, "run")
            title = f"{record['run_id']}/{name}"
        if step is not None:
            tags[PREFIX + "step"] = str(step)
        run = self._client.create_run(self._experiment_id, start_time=record["time_ms"], tags=tags, run_name=title)
        return str(run.info.run_id)

    def _model(self, uid: str) -> str | None:
        """The id of the logged model that carries `uid`."""
        found = self._client.search_logged_models([self._experiment_id], f"tags.`{UID}` = '{uid}'", max_results=1)
        return str(found[0].model_id) if found else None

    def _create_model(self, record: Record, run: str, parent: str | None) -> str:
        """An external logged model: MLflow knows where the checkpoint is and holds none of it."""
        tags = {name: str(record[name]) for name in ("run_id", "version", "uri", "weights_version", "step")}
        tags |= {f"table.{number}": table["digest"] for number, table in enumerate(record["tables"])}
        if record.get("parent_uid"):
            tags["parent_uid"] = record["parent_uid"]
        external = {UID: record["uid"], "mlflow.model.isExternal": "true"} | ({PARENT_MODEL: parent} if parent else {})
        model = self._client.create_logged_model(
            self._experiment_id,
            name=model_name(f"{record['run_id']}-v{record['version']}"),
            source_run_id=run,
            tags=own_tags(tags) | external,
        )
        entities.write_model_file(self._client, model)
        return str(model.model_id)


def _sibling(record: Record, name: str) -> str:
    """The uid of the record called `name` in the outbox that `record` came through."""
    return f"{record['uid'].rpartition('/')[0]}/{name}"
