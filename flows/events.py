"""What a run tells Prefect's automations: a checkpoint was saved, a metric has crossed a bound.

Events are sent by a thread of Prefect's own: a run neither waits for it nor fails by it. One that Prefect did not get
is not sent again; what it was about is in the run's folder.
"""

import logging
from typing import Any

from prefect.events import emit_event

from milepost.flows.evaluation_request import evaluation_name
from milepost.flows.start import Launched
from milepost.storage.eval_sets import eval_sets
from milepost.storage.manifest import StepManifest
from milepost.storage.weight_version import WeightVersion
from milepost.tasks.watched import Crossing

CHECKPOINT_SAVED = "milepost.checkpoint.saved"
METRIC_CROSSED = "milepost.metric.crossed"
RESOURCE = "milepost.run"
EVALUABLE = "milepost.held-out"  # whether the run says what its checkpoints are to be evaluated on

_log = logging.getLogger(__name__)


def checkpoint_saved(launched: Launched, closed: StepManifest) -> None:
    """The trainer's state after a step is stored. `evaluation` is what one of it on the run's own sets is called."""
    version, sets = WeightVersion.parse(closed.version_out), eval_sets(launched.record.parameters.eval)
    payload = {
        "step": version.step,
        "uri": closed.checkpoint,
        "weights_version": closed.version_out,
        "evaluation": evaluation_name(launched.folder.run_id, version, sets),
    }
    _emit(CHECKPOINT_SAVED, launched, payload)


def metric_crossed(launched: Launched, crossing: Crossing) -> None:
    """A metric came to be beyond a bound; `step` counts the finished steps."""
    payload = {"step": crossing.point.after, "value": crossing.point.value, "reason": crossing.reason}
    _emit(METRIC_CROSSED, launched, crossing.bound.model_dump(mode="json") | payload)


def _emit(event: str, launched: Launched, payload: dict[str, Any]) -> None:
    run, sections = launched.folder.run_id, launched.record.parameters
    resource = {
        "prefect.resource.id": f"{RESOURCE}.{run}",
        "prefect.resource.name": run,
        EVALUABLE: "yes" if sections.eval.path or sections.eval.sets else "no",
    }
    try:
        emit_event(event, resource, payload={"run": run, "root": launched.root, **payload})
    except Exception as error:  # whatever Prefect raises: the run is not about it
        _log.debug("%s was not told: %s", event, error)
