"""What a run is called that nobody gave a name: always the same for the same flow run, however often that starts."""

import re

from prefect.runtime import deployment, flow_run


def made_name() -> str:
    """The deployment of this flow run, and the end of its id."""
    prefix = re.sub("[^A-Za-z0-9]+", "-", deployment.name or "train").strip("-") or "train"
    return f"{prefix}-{str(flow_run.id)[-8:]}"


def shown_name() -> str:
    """The name of the run that this flow run works on."""
    return str(flow_run.parameters.get("run") or made_name())
