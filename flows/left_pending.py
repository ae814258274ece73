"""Flow runs that a worker had taken, and was gone before their process began: Prefect has them wait for it for ever."""

from datetime import UTC, datetime, timedelta

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
    WorkPoolFilter,
    WorkPoolFilterName,
)
from prefect.client.schemas.objects import StateType
from prefect.states import Scheduled

STARTING_SECONDS = 300.0  # more than any process takes to begin


def schedule_again(client: SyncPrefectClient, pool: str, *, older_than_seconds: float = STARTING_SECONDS) -> list[str]:
    """Put those of a work pool back, for the next worker; returns their names. They hold places of the pool else."""
    pending = FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.PENDING])))
    in_pool = WorkPoolFilter(name=WorkPoolFilterName(any_=[pool]))
    since = datetime.now(UTC) - timedelta(seconds=older_than_seconds)
    found = client.read_flow_runs(flow_run_filter=pending, work_pool_filter=in_pool)
    left = [run for run in found if run.state is not None and run.state.timestamp < since]
    for run in left:
        client.set_flow_run_state(run.id, Scheduled(message="the worker that had it is gone"), force=True)
    return [run.name for run in left]
