"""What became of a flow run since it was suspended: its process has ended, so only Prefect's server can tell.

It is asked without Prefect's client, which takes seconds to import, and only the server that commands use here: a run
folder from elsewhere does not decide whom they speak to.
"""

import json
import os
import urllib.error
import urllib.request

from milepost.flows import service_state
from milepost.storage.lease import Note

ANSWER_SECONDS = 2.0
_GONE = "GONE"
# Whatever is not here can still be resumed on its page.
_ENDED = {
    "CANCELLING": "cancelled",
    "CANCELLED": "cancelled",
    "CRASHED": "crashed",
    "FAILED": "stopped",
    "COMPLETED": "stopped",
    _GONE: "stopped",
}


def since_suspended(noted: Note) -> str:
    """`cancelled`, `crashed`, or `stopped`, as where its page is gone; empty for one that can be resumed there still.

    So it is for one of whose server nothing is known here.
    """
    api = _known_api()
    if not noted.flow_run or not api or api != noted.api:
        return ""
    return _ENDED.get(_state(f"{api}/flow_runs/{noted.flow_run}"), "")


def _known_api() -> str:
    """The server of the environment, or that of `milepost up`."""
    started = service_state.load().get("prefect")
    return os.environ.get("PREFECT_API_URL") or (started.url if started else "")


def _state(url: str) -> str:
    """The type of a flow run's state; empty where nobody answers that."""
    try:
        with urllib.request.urlopen(url, timeout=ANSWER_SECONDS) as answer:
            return str(json.load(answer)["state"]["type"])
    except urllib.error.HTTPError as error:
        return _GONE if error.code == 404 else ""
    except (OSError, ValueError, LookupError, TypeError):
        return ""
