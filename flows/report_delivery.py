"""A report on its way: into the run folder, to MLflow through the run's outbox, and onto a page of Prefect's."""

from uuid import UUID

import httpx
from prefect.exceptions import PrefectException
from prefect.settings import PREFECT_API_URL

from milepost.flows import report_artifact
from milepost.flows.prefect_client import prefect_client
from milepost.flows.progress import say
from milepost.flows.report import write_report
from milepost.flows.service_state import answers
from milepost.flows.services import running
from milepost.flows.tracker import Tracker, tracking_uri
from milepost.storage import attempts, redaction, runs
from milepost.storage.lease import LeaseHeld, hold
from milepost.storage.lineage import Lineage
from milepost.storage.lineage_records import report_record
from milepost.storage.outbox import DeliveryFailed, Outbox, deliver, uid_of
from milepost.storage.parameters import TrackingSection
from milepost.storage.runs import RunFolder

ANSWER_SECONDS = 2.0


def report_at_end(folder: RunFolder, tracker: Tracker, flow_run: str) -> None:
    """The report of a run that ends, well or not: what keeps it from being made is said, and ends nothing else."""
    try:
        tracker.report(write_report(folder))
    except (ValueError, LookupError, OSError) as error:
        say(f"the report of run {folder.run_id!r} was not written: {error}")
        return
    if flow_run and answers(f"{PREFECT_API_URL.value()}/health", timeout_seconds=ANSWER_SECONDS):
        _show(folder, UUID(flow_run), _page(folder, tracker.lineage))


def report_now(root: str, run: str) -> str:
    """Write the report of a run, finished or not, bring it to where the run was tracked, and return where it is."""
    folder = runs.run_folder(root, run)
    page, services = write_report(folder), running()
    _tell_mlflow(folder, root, services.mlflow_url)
    if services.prefect_url:
        with prefect_client(services.prefect_url, "CRITICAL", drain=False):
            _show(folder, None, _page(folder, _lineage(folder, root, services.mlflow_url)))
    return page


def _lineage(folder: RunFolder, root: str, running_url: str | None) -> Lineage | None:
    """Where the run is tracked; None where it is not, or a secret of the address is not known here."""
    tracking = attempts.current(folder).parameters.tracking
    try:
        tracking = TrackingSection(**redaction.resolved(tracking.model_dump()))
    except (ValueError, LookupError):
        return None
    uri = tracking_uri(tracking, root=root, running_url=running_url)
    return Lineage(uri, experiment=tracking.experiment) if tracking.enabled else None


def _page(folder: RunFolder, lineage: Lineage | None) -> str:
    """Where MLflow shows the report; empty where no server of it answers."""
    if lineage is None or not answers(f"{lineage.tracking_uri}/health", timeout_seconds=ANSWER_SECONDS):
        return ""
    try:
        return lineage.report_page(uid_of(folder.outbox))
    except DeliveryFailed:
        return ""


def _show(folder: RunFolder, flow_run: UUID | None, page: str) -> None:
    try:
        report_artifact.show(folder, flow_run, page)
    except (httpx.HTTPError, PrefectException) as error:
        say(f"Prefect does not show the report: {error or type(error).__name__}")


def _tell_mlflow(folder: RunFolder, root: str, running_url: str | None) -> None:
    """A new record, sent at once to where records of the run went before, unless the run itself will send it."""
    tracking, outbox = attempts.current(folder).parameters.tracking, Outbox(folder.outbox)
    if not tracking.enabled or not outbox.records():
        return
    outbox.append(report_record(folder.run_id, folder.report))
    try:
        waiting = _deliver(
            folder, outbox, TrackingSection(**redaction.resolved(tracking.model_dump())), root, running_url
        )
    except LeaseHeld:
        return
    except (ValueError, LookupError) as error:  # a secret that is not known here
        waiting = str(error)
    if waiting:
        say(f"the report waits in {folder.outbox}: {waiting}")


def _deliver(folder: RunFolder, outbox: Outbox, tracking: TrackingSection, root: str, running_url: str | None) -> str:
    """Why records still wait, if they do."""
    uri = tracking_uri(tracking, root=root, running_url=running_url)
    target = redaction.masked_text(uri)
    if not outbox.has_reached(target):
        return f"{target} knows nothing of the run"
    with hold(folder):
        return deliver(outbox, Lineage(uri, experiment=tracking.experiment).send, target=target).error
