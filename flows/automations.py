"""What a Prefect server does by itself: evaluate what was saved, now and then or at once, and call a webhook on alerts.

Each is made once and brought up to date when it is asked for again.
"""

import os
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

from prefect.blocks.webhook import Webhook
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.schedules import CronSchedule
from prefect.events import EventTrigger
from prefect.events.actions import ActionTypes, CallWebhook, RunDeployment
from prefect.events.schemas.automations import AutomationCore, Posture
from prefect.exceptions import ObjectNotFound

from milepost.flows.events import CHECKPOINT_SAVED, EVALUABLE, METRIC_CROSSED, RESOURCE
from milepost.storage import redaction

EVALUATE_SAVED = "milepost: evaluate saved checkpoints"
ALERT = "milepost: call the webhook when a metric crosses its bound"
BLOCK = "milepost-alerts"
FIELDS = ("run", "root", "step", "metric", "value", "above", "below", "in_a_row", "reason")


def webhook_url(text: str) -> str:
    """The address itself, or that of `env:NAME`; ValueError for what is none, which is not repeated: it is a secret."""
    if redaction.is_reference(text):
        name = text.removeprefix("env:")
        if name not in os.environ:
            raise ValueError(f"--alert-webhook {text}: the environment has no variable {name}, set it")
        text = os.environ[name]
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("--alert-webhook must be an address such as https://host/path, or env:NAME of one")
    return text


def cron_schedule(text: str) -> CronSchedule:
    """ValueError for what cron does not know."""
    try:
        return CronSchedule(cron=text, timezone="UTC")
    except ValueError:
        raise ValueError(f"--evaluate-every {text!r} is no cron expression: give one such as '0 */6 * * *'") from None


def kept_schedules(client: SyncPrefectClient, deployment: str) -> list[DeploymentScheduleCreate] | None:
    """The schedules of a deployment as somebody has left them, which registering it again would take away."""
    try:
        found = client.read_deployment_by_name(deployment)
    except ObjectNotFound:
        return None
    return [
        DeploymentScheduleCreate.model_validate(item.model_dump(include=set(DeploymentScheduleCreate.model_fields)))
        for item in found.schedules
    ]


def ensure_evaluation(client: SyncPrefectClient, deployment: UUID, *, active: bool) -> None:
    """Evaluate every checkpoint that is saved by a run that says on what; `deployment` is that of `evaluate`."""
    parameters = {
        "checkpoint": _template("{{ event.payload.run }}@{{ event.payload.step }}"),
        "run": _template("{{ event.payload.evaluation }}"),
        "root": _template("{{ event.payload.root }}"),
        "skip_removed": True,
    }
    action = RunDeployment(source="selected", deployment_id=deployment, parameters=parameters)
    trigger = _on(CHECKPOINT_SAVED, {EVALUABLE: "yes"})
    about = "Starts the deployment `evaluate` on the data sets of the run whenever a checkpoint was saved."
    _ensure(client, AutomationCore(name=EVALUATE_SAVED, description=about, trigger=trigger, actions=[action]), active)


def ensure_alert(client: SyncPrefectClient, url: str) -> None:
    """Post every alert as JSON to `url`, which a block of the server keeps as a secret."""
    Webhook(method="POST", url=url, headers={"Content-Type": "application/json"}).save(BLOCK, overwrite=True)  # type: ignore[arg-type]
    block = client.read_block_document_by_name(BLOCK, Webhook.get_block_type_slug())
    pairs = ", ".join(f'"{name}": {{{{ event.payload.{name} | tojson }}}}' for name in FIELDS)
    action: ActionTypes = CallWebhook(block_document_id=block.id, payload=f"{{{pairs}}}")
    about = f"Posts what `alert.bounds` of a run tell of to the address in the block `{BLOCK}`."
    core = AutomationCore(name=ALERT, description=about, trigger=_on(METRIC_CROSSED, {}), actions=[action])
    _ensure(client, core, active=True)


def _template(text: str) -> dict[str, str]:
    return {"__prefect_kind": "jinja", "template": text}


def _on(event: str, match: dict[str, Any]) -> EventTrigger:
    """At each such event of any run."""
    return EventTrigger(
        expect={event},
        match={"prefect.resource.id": f"{RESOURCE}.*", **match},
        posture=Posture.Reactive,
        threshold=1,
        within=timedelta(0),
    )


def _ensure(client: SyncPrefectClient, wanted: AutomationCore, active: bool) -> None:
    found = client.read_automations_by_name(wanted.name)
    if found:
        client.update_automation(found[0].id, wanted.model_copy(update={"enabled": active}))
    elif active:
        client.create_automation(wanted)
