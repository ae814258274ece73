"""What a run tells MLflow, and when: into the outbox at once, to the server by a courier that no step waits for."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from milepost.flows.launches import local_folder
from milepost.flows.outcome import signal_in
from milepost.flows.results import evaluation_folder
from milepost.flows.start import Launched
from milepost.storage import lineage_links as links
from milepost.storage import lineage_records as records
from milepost.storage import manifest, redaction
from milepost.storage.evaluation_link import held_out_told
from milepost.storage.journal import StepStore
from milepost.storage.lineage import Lineage, sqlite_uri
from milepost.storage.manifest import StepManifest
from milepost.storage.outbox import Courier, Outbox, Record
from milepost.storage.parameters import TrackingSection
from milepost.storage.runs import RunFolder
from milepost.storage.weight_version import WeightVersion
from milepost.tasks.eval_scores import SetScore

log = logging.getLogger(__name__)


@dataclass
class Tracker:
    """Posts one record for each thing that happened. `last_checkpoint` is the version the next one descends from.

    `reason` is why the run ends before its last step, `lineage` where the records go.
    """

    folder: RunFolder
    flow_run_id: str
    courier: Courier | None
    last_checkpoint: int | None = None
    reason: str = ""
    lineage: Lineage | None = None

    def step(self, closed: StepManifest) -> None:
        """A finished step: its metrics and tables, and its checkpoint if it saved one."""
        if self.courier is None:
            return
        self.courier.post(links.step_closed(self.folder, closed, flow_run_id=self.flow_run_id))
        if closed.checkpoint:
            self.courier.post(links.checkpoint_saved(self.folder, closed, parent=self.last_checkpoint))
            self.last_checkpoint = closed.step + 1

    def catch_up(self, told: set[str]) -> None:
        """Tell of every finished step that `told` has no record of: whoever closed it was killed, or did not track."""
        for step in manifest.finished_steps(self.folder):
            closed = manifest.load(self.folder, step)
            if records.step_id(step) not in told or (closed.checkpoint and records.checkpoint_id(step + 1) not in told):
                self.step(closed)
            elif closed.checkpoint:
                self.last_checkpoint = step + 1

    def evaluated(self, version: WeightVersion, scores: list[SetScore]) -> None:
        """Held-out scores of weights, whether they have a checkpoint or not."""
        if self.courier is None or not scores:
            return
        metrics = {name: value for score in scores for name, value in score.metrics().items()}
        store = StepStore(evaluation_folder(self.folder, version.step), self.folder.run_id, version.step)
        self.courier.post(held_out_told(self.folder, store, f"{version.step}-{version.digest}", metrics))

    def best(self, version: int, metric: str, value: float) -> None:
        """Another checkpoint is the best one now."""
        if self.courier is not None:
            self.courier.post(records.best_record(self.folder.run_id, version, metric=metric, value=value))

    def report(self, uri: str) -> None:
        """The report of the run was written anew."""
        if self.courier is not None:
            self.courier.post(records.report_record(self.folder.run_id, uri))


def tracking_uri(tracking: TrackingSection, *, root: str, running_url: str | None) -> str:
    """Where lineage goes: as configured, else the running server, else a database beside the runs."""
    return tracking.mlflow_uri or running_url or sqlite_uri(local_folder(root))


@contextmanager
def open_tracker(launched: Launched, *, uri: str, flow_run_id: str) -> Iterator[Tracker]:
    """Announce the run or its new attempt, and its end; what MLflow has not taken by then waits in the outbox."""
    folder, record = launched.folder, launched.record
    if not record.parameters.tracking.enabled:
        yield Tracker(folder, flow_run_id, None)
        return
    experiment = record.parameters.tracking.experiment
    outbox = Outbox(folder.outbox)
    lineage = Lineage(uri, experiment=experiment)
    courier = Courier(outbox, lineage.send, target=redaction.masked_text(uri))
    told = outbox.ids()
    courier.start()
    for announced in _announcements(launched, flow_run_id):
        courier.post(announced)
    tracker = Tracker(folder, flow_run_id, courier, lineage=lineage)
    status: records.Status = "FAILED"
    try:
        tracker.catch_up(told)
        yield tracker
        status = "FINISHED"
    except BaseException as error:
        if signal_in(error) or not isinstance(error, Exception):
            status = "KILLED"
        raise
    finally:
        courier.post(records.end_record(folder.run_id, status, reason=tracker.reason))
        delivery = courier.stop()
        if delivery.waiting:
            log.warning("%d lineage records wait in %s: %s", delivery.waiting, folder.outbox, delivery.error)


def _announcements(launched: Launched, flow_run_id: str) -> list[Record]:
    """The run, which is sent once however often it is announced, and the attempt when it is not the first."""
    found = [links.run_began(launched.folder, flow_run_id=flow_run_id)]
    if launched.attempt > 1:
        found.append(links.attempt_began(launched.folder, launched.attempt, flow_run_id=flow_run_id))
    return found
