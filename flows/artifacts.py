"""Artifacts of a flow run in Prefect, each made once and changed in place: many steps leave no pile of them."""

import hashlib
import re
from dataclasses import dataclass, field
from typing import Any, Literal
from uuid import UUID

import httpx
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactCreate
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

REQUEST_SECONDS = 5.0


@dataclass(frozen=True)
class Artifact:
    """`name` is what tells it from the others of a run; `data` is a number for progress, and text for the others."""

    name: str
    type: Literal["progress", "table", "markdown"]
    data: float | str
    description: str = ""


def artifact_key(run: str, name: str) -> str:
    """A key of the letters that Prefect takes; runs whose names differ in others only have different keys."""
    slug = re.sub(r"[^a-z0-9]+", "-", run.lower()).strip("-")
    mark = "" if slug == run else f"-{hashlib.sha256(run.encode()).hexdigest()[:6]}"
    return f"{slug}{mark}-{name}"


@dataclass
class Artifacts:
    """Those of one run on the page of one flow run."""

    run: str
    flow_run_id: str
    _made: dict[str, UUID] = field(default_factory=dict)
    _shown: dict[str, Artifact] = field(default_factory=dict)

    def show(self, artifacts: list[Artifact]) -> None:
        """Bring Prefect up to date, with one short request for each that has changed; it raises what a request does."""
        changed = [artifact for artifact in artifacts if self._shown.get(artifact.name) != artifact]
        if not changed:
            return
        with (
            temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}),
            get_client(httpx_settings={"timeout": REQUEST_SECONDS}, sync_client=True) as client,
        ):
            for artifact in changed:
                self._send(client, artifact)
                self._shown[artifact.name] = artifact

    def _send(self, client: Any, artifact: Artifact) -> None:
        """By a plain request: the client's own method for it stores all that is shown once more, as an event."""
        made = self._made.get(artifact.name)
        if made is not None:
            body = {"data": artifact.data, "description": artifact.description}
            try:
                client.request("PATCH", "/artifacts/{id}", json=body, path_params={"id": made})
                return
            except httpx.HTTPStatusError as error:
                if error.response.status_code != httpx.codes.NOT_FOUND:
                    raise
        created = client.create_artifact(
            ArtifactCreate(
                key=artifact_key(self.run, artifact.name),
                type=artifact.type,
                data=artifact.data,
                description=artifact.description,
                flow_run_id=UUID(self.flow_run_id),
            )
        )
        self._made[artifact.name] = created.id
