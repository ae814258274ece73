"""What a run tells MLflow, and when: into the outbox at once, to the server by a courier that no step waits for."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from milepost.flows.launches import local_folder
from milepost.flows.start import Launched
from milepost.storage import lineage_records as records
from milepost.storage import manifest, runs
from milepost.storage.lineage import Lineage, sqlite_uri
from milepost.storage.manifest import StepManifest
from milepost.storage.outbox import Courier, Outbox
from milepost.storage.parameters import TrackingSection
from milepost.storage.runs import RunFolder, RunRecord
from milepost.storage.tables import TableRef

log = logging.getLogger(__name__)


@dataclass
class Tracker:
    """Posts one record for each thing that happened. `last_checkpoint` is the version the next one descends from."""

    run_id: str
    flow_run_id: str
    record: RunRecord
    courier: Courier | None
    last_checkpoint: int | None = None

    def _post(self, record: records.Record) -> None:
        if self.courier is not None:
            self.courier.post(record)

    def step(self, closed: StepManifest) -> None:
        """A finished step: its metrics and tables, and its checkpoint if it saved one."""
        tables = step_tables(closed)
        tags: dict[str, str | int | float] = {
            "weights_version_in": closed.version_in,
            "weights_version_out": closed.version_out,
            "parameters_digest": self.record.parameters_digest,
            "commit": self.record.provenance.commit,
            "flow_run_id": self.flow_run_id,
        }
        self._post(records.step_record(self.run_id, closed.step, metrics=closed.metrics, tables=tables, tags=tags))
        if closed.checkpoint:
            self._checkpoint(closed, list(tables.values()))

    def _checkpoint(self, closed: StepManifest, tables: list[TableRef]) -> None:
        version = closed.step + 1
        self._post(
            records.checkpoint_record(
                self.run_id,
                version,
                uri=closed.checkpoint,
                weights_version=closed.version_out,
                step=closed.step,
                parent=self.last_checkpoint,
                tables=tables,
            )
        )
        self.last_checkpoint = version


def step_tables(closed: StepManifest) -> dict[str, TableRef]:
    """The tables of a step by the name of the stage that wrote them, the final form of each sample only."""
    return {
        f"{entry['slot']}/{name}": TableRef(**ref)
        for entry in closed.commits
        if entry["slot"].split("-")[0] in ("sample", "filter", "optimize")
        for name, ref in entry["tables"].items()
    }


def tracking_uri(tracking: TrackingSection, *, root: str, running_url: str | None) -> str:
    """Where lineage goes: as configured, else the running server, else a database beside the runs."""
    return tracking.mlflow_uri or running_url or sqlite_uri(local_folder(root))


@contextmanager
def open_tracker(launched: Launched, *, uri: str, flow_run_id: str) -> Iterator[Tracker]:
    """Announce the run or its new attempt, and its end; what MLflow has not taken by then waits in the outbox."""
    folder, record = launched.folder, launched.record
    before = last_checkpoint(folder)
    if not record.parameters.tracking.enabled:
        yield Tracker(folder.run_id, flow_run_id, record, None, before)
        return
    experiment = record.parameters.tracking.experiment
    courier = Courier(Outbox(folder.outbox), Lineage(uri, experiment=experiment).send, target=uri)
    courier.start()
    for announced in _announcements(launched, flow_run_id):
        courier.post(announced)
    status: records.Status = "FAILED"
    try:
        yield Tracker(folder.run_id, flow_run_id, record, courier, before)
        status = "FINISHED"
    except (KeyboardInterrupt, SystemExit, asyncio.CancelledError):
        status = "KILLED"
        raise
    finally:
        courier.post(records.end_record(folder.run_id, status))
        delivery = courier.stop()
        if delivery.waiting:
            log.warning("%d lineage records wait in %s: %s", delivery.waiting, folder.outbox, delivery.error)


def last_checkpoint(folder: RunFolder) -> int | None:
    """The weight version of the newest checkpoint that a finished step names."""
    for step in reversed(manifest.finished_steps(folder)):
        if manifest.load(folder, step).checkpoint:
            return step + 1
    return None


def _announcements(launched: Launched, flow_run_id: str) -> list[records.Record]:
    """The run, which is sent once however often it is announced, and the attempt when it is not the first."""
    folder, began = launched.folder, runs.load(launched.folder)
    tags = {
        "run_id": folder.run_id,
        "uri": folder.uri,
        "commit": began.provenance.commit,
        "diff_digest": began.provenance.diff_digest,
        "packages_digest": began.provenance.packages_digest,
        "flow_run_id": flow_run_id,
    }
    parameters = began.parameters.model_dump(mode="json")
    found = [records.run_record(folder.run_id, parameters=parameters, tags=tags)]
    if launched.attempt > 1:
        commit = launched.record.provenance.commit
        again = {"attempt": launched.attempt, "commit": commit, "flow_run_id": flow_run_id}
        found.append(records.attempt_record(folder.run_id, launched.attempt, launched.changes or {}, tags=again))
    return found
