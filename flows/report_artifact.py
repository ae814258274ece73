"""The report as Prefect shows it: its headline in one markdown artifact, and the way to the file in another.

Each has one key a run. A flow run has one of each, which is replaced when the report is written anew.
"""

import base64
from pathlib import Path
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId, ArtifactFilterKey
from prefect.client.schemas.sorting import ArtifactSort

from milepost.flows.artifacts import artifact_key
from milepost.flows.curve import FigureData, Series, svg_figure
from milepost.flows.report_headline import headline
from milepost.flows.results import finished
from milepost.storage import files
from milepost.storage.runs import RunFolder

INK = "#808890"  # read on white and on black
POINTS = 200  # of the curve: an artifact is a row of a database


def markdown(folder: RunFolder) -> str:
    """The numbers that a report begins with, and the reward curve as a picture inside the text."""
    rows = "\n".join(f"| {name} | {value} |" for name, value in headline(folder))
    return f"# {folder.run_id}\n\n| | |\n|---|---|\n{rows}\n\n{_curve(folder)}"


def _curve(folder: RunFolder) -> str:
    found = [
        (step.step, step.metrics["rollout/reward"]) for step in finished(folder) if "rollout/reward" in step.metrics
    ]
    if not found:
        return "No step with a reward has finished."
    shown = found[:: -(-len(found) // POINTS)]
    series = Series("reward", [step for step, _ in shown], [value for _, value in shown])
    picture = svg_figure(FigureData("mean reward", [series])).replace("currentColor", INK)
    return f"![mean reward by step](data:image/svg+xml;base64,{base64.b64encode(picture.encode()).decode()})"


def way(folder: RunFolder, page: str) -> str:
    """How to see the whole report: on `page`, if there is one. Browsers follow no link to a file, from no page."""
    if page:
        return f"[the whole report, in MLflow]({page})\n\nIts file is `{folder.report}`."
    if files.is_local(folder.report):
        return f"The whole report is a file. Paste this into the address bar:\n\n`{_address(folder.report)}`"
    return f"The whole report is `{folder.report}`."


def _address(path: str) -> str:
    return path if "://" in path else Path(path).absolute().as_uri()


def show(folder: RunFolder, flow_run: UUID | None = None, page: str = "") -> None:
    """Put both artifacts on the page of a flow run; without one, on the page that showed them last.

    `page` is where MLflow shows the whole report.
    """
    with get_client(sync_client=True) as client:
        for name, data, description in (
            ("report", markdown(folder), f"Report of run {folder.run_id}"),
            ("report-file", way(folder, page), f"The whole report of run {folder.run_id}"),
        ):
            _put(client, artifact_key(folder.run_id, name), data, description, flow_run)


def _put(client: SyncPrefectClient, key: str, data: str, description: str, flow_run: UUID | None) -> None:
    of_key = ArtifactFilter(
        key=ArtifactFilterKey(any_=[key]),
        flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run]) if flow_run else None,
    )
    for found in client.read_artifacts(artifact_filter=of_key, sort=ArtifactSort.UPDATED_DESC, limit=1):
        client.update_artifact(found.id, ArtifactUpdate(data=data))
        return
    client.create_artifact(
        ArtifactCreate(key=key, type="markdown", description=description, data=data, flow_run_id=flow_run)
    )
