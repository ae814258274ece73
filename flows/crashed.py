"""Flow runs whose process was killed: Prefect shows them as running for ever, so the next start marks them as crashed.

A flow run carries its process as labels. Only a process that is provably gone, or whose run was taken over, is marked.
What is below one that is suspended ends with its process: nobody comes back to it if the run is cancelled then.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas import filters
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.context import FlowRunContext
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Cancelled, Completed, Crashed

from milepost.flows.evaluation_results import is_evaluation
from milepost.flows.prefect_client import brief_client
from milepost.flows.run_status import run_status
from milepost.storage.lease import Owner, is_gone, is_released, newest_fence, this_process
from milepost.storage.runs import RunFolder

LIMIT = 50  # flow runs looked at in one go, the newest first

_OPEN = [StateType.RUNNING, StateType.CANCELLING]
# One that waits for its first or its next process is pending or paused; what a dead one left so is its children.
_UNFINISHED = [*_OPEN, StateType.PENDING, StateType.SCHEDULED, StateType.PAUSED]
_log = logging.getLogger(__name__)


def record_owner(run_uri: str, fence: int, command: str) -> None:
    """Say on the flow run that calls this which process works on it, under which claim, and what to do if it dies."""
    labels = {f"milepost.{name}": value for name, value in asdict(this_process()).items()}
    labels |= {"milepost.run_uri": run_uri, "milepost.fence": fence, "milepost.command": command}
    labels["milepost.attempt"] = flow_run.run_count
    with _never_stops_a_start(), brief_client() as client:
        client.update_flow_run_labels(UUID(flow_run.id), labels)
        if owner_before():  # which may have been killed in the middle of a step
            _end_below(client, UUID(flow_run.id), Crashed(message="it was stopped here, and the run went on later"))


def owner_before() -> Owner | None:
    """The process that the flow run which calls this had before this one, if its labels tell of one."""
    context = FlowRunContext.get()
    with contextlib.suppress(KeyError, TypeError, ValueError):
        return _owner(context.flow_run) if context and context.flow_run else None
    return None


def end_suspended() -> None:
    """End the step below the flow run that calls this, whose process ends here; the next one has not said who it is."""
    suspended = Cancelled(name="Suspended", message="its run was suspended here, and goes on here if it is resumed")
    with _never_stops_a_start(), brief_client() as client:
        client.update_flow_run_labels(UUID(flow_run.id), {"milepost.attempt": 0})
        _end_below(client, UUID(flow_run.id), suspended)


def mark_cancelled() -> None:
    """End the flow run that calls this, and its step, as cancelled: it was, and no worker has said so."""
    cancelled = Cancelled(message="it was cancelled, and ended by itself")
    with _never_stops_a_start(), get_client(sync_client=True) as client:  # it may be busy, and nobody else says so
        _end(client, UUID(flow_run.id), cancelled)


def mark_gone(url: str) -> None:
    """Mark every flow run at `url` whose process has ended without a word."""
    with _never_stops_a_start(), temporary_settings({PREFECT_API_URL: url}), brief_client() as client:
        _mark(client, lambda run: is_gone(_owner(run)))


def mark_superseded(run_uri: str, fence: int) -> None:
    """Mark also every flow run that worked on this run under an earlier claim and neither released it nor ended."""

    def is_superseded(run: FlowRun) -> bool:
        before = int(run.labels["milepost.fence"])
        same = run.labels["milepost.run_uri"] == run_uri
        return same and before < fence and not is_released(run_uri, before)

    with _never_stops_a_start(), brief_client() as client:
        _mark(client, lambda run: is_gone(_owner(run)) or is_superseded(run))


def complete_unseen(parent: UUID) -> None:
    """End the steps below a flow run, between two of them, whose end Prefect could not be told."""
    with _never_stops_a_start(), brief_client() as client:
        for child in _children(client, parent):
            state = Completed(message="this step went on while Prefect did not answer")
            client.set_flow_run_state(child.id, state, force=True)


def end_below(flow: object, flow_run: FlowRun, state: State) -> None:
    """Mark what still ran below a flow run that crashed; a hook, which Prefect calls with these names."""
    with _never_stops_a_start(), brief_client() as client:
        _end_below(client, flow_run.id, Crashed(message=state.message or "the process was killed"))


@contextlib.contextmanager
def _never_stops_a_start() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # whatever a server answers or a label holds: it only concerns what Prefect shows
        _log.warning("Prefect may show killed runs as running: %s", error)


def _owner(run: FlowRun) -> Owner:
    labels = {name: run.labels[f"milepost.{name}"] for name in Owner.__dataclass_fields__}
    return Owner(str(labels["host"]), str(labels["space"]), int(labels["pid"]), float(labels["started"]))


def _mark(client: SyncPrefectClient, is_dead: Callable[[FlowRun], bool]) -> None:
    """Read twice: one that ended in order between the first look and the death of its process keeps its state."""
    dead = [run for run in _open_runs(client) if _is_labelled(run) and _provably(is_dead, run)]
    if not dead:
        return
    for run in _open_runs(client, [run.id for run in dead]):
        owner, command = _owner(run), run.labels["milepost.command"]
        if _provably(_ended_well, run):
            _end(client, run.id, Completed(message="it ended well while Prefect did not answer"))
        else:
            _end(client, run.id, Crashed(message=f"{owner} was killed or lost this run; go on with: {command}"))


def _ended_well(run: FlowRun) -> bool:
    """A run that came to its end under the claim of this flow run. Of an evaluation its gate may have failed."""
    uri, fence = str(run.labels["milepost.run_uri"]), int(run.labels["milepost.fence"])
    folder = RunFolder(uri, uri.rpartition("/")[2])
    done = is_released(uri, fence) and newest_fence(uri) == fence
    return done and not is_evaluation(folder) and run_status(folder).state == "finished"


def _provably(is_dead: Callable[[FlowRun], bool], run: FlowRun) -> bool:
    """Labels that cannot be read prove nothing."""
    try:
        return is_dead(run)
    except (KeyError, TypeError, ValueError):
        return False


def _open_runs(client: SyncPrefectClient, ids: Sequence[UUID] | None = None) -> list[FlowRun]:
    wanted = filters.FlowRunFilter(
        id=filters.FlowRunFilterId(any_=list(ids)) if ids else None,
        state=filters.FlowRunFilterState(type=filters.FlowRunFilterStateType(any_=_OPEN)),
        parent_task_run_id=filters.FlowRunFilterParentTaskRunId(is_null_=True),
    )
    return client.read_flow_runs(flow_run_filter=wanted, limit=LIMIT)


def _is_labelled(run: FlowRun) -> bool:
    """Whether the process that runs it now has said so: after a retry the labels are of the process before."""
    return run.labels.get("milepost.attempt") == run.run_count


def _children(client: SyncPrefectClient, run_id: UUID) -> list[FlowRun]:
    unfinished = filters.FlowRunFilter(
        parent_flow_run_id=filters.FlowRunFilterParentFlowRunId(any_=[run_id]),
        state=filters.FlowRunFilterState(type=filters.FlowRunFilterStateType(any_=_UNFINISHED)),
    )
    return client.read_flow_runs(flow_run_filter=unfinished)


def _end(client: SyncPrefectClient, run_id: UUID, state: State) -> None:
    """Mark a flow run, after what runs below it: one that is interrupted here is found again."""
    _end_below(client, run_id, state)
    client.set_flow_run_state(run_id, state, force=True)


def _end_below(client: SyncPrefectClient, run_id: UUID, state: State) -> None:
    children = [child.id for child in _children(client, run_id)]
    tasks = client.read_task_runs(
        task_run_filter=filters.TaskRunFilter(
            flow_run_id=filters.TaskRunFilterFlowRunId(any_=[*children, run_id]),
            state=filters.TaskRunFilterState(type=filters.TaskRunFilterStateType(any_=_UNFINISHED)),
        )
    )
    for task in tasks:
        client.set_task_run_state(task.id, state, force=True)
    for child in children:
        client.set_flow_run_state(child, state, force=True)
