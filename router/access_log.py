"""One line of JSON for each request that was passed on: details, of which a run has one a sample."""

import json
import logging
import re
import time
from dataclasses import asdict, dataclass

log = logging.getLogger(__name__)

_RID = re.compile(rb'"rid"\s*:\s*"([^"\\]{1,200})"')


@dataclass
class Access:
    """What became of a request. `sample` is the `rid` of its body, where it has one at its beginning or its end."""

    request_id: str
    method: str
    path: str
    sample: str = ""
    worker: str = ""
    weight_version: str = ""
    status: int = 0
    resends: int = 0
    bytes_out: int = 0
    seconds: float = 0.0
    problem: str = ""

    def write(self) -> None:
        known = {name: value for name, value in asdict(self).items() if value != ""}
        log.debug("%s", json.dumps({"time": round(time.time(), 3), **known}))


def sample_of(body: bytes) -> str:
    """The `rid` that a JSON body names; empty when it is not within its first or last 4 KiB."""
    found = _RID.search(body[:4096]) or _RID.search(body[-4096:])
    return found[1].decode(errors="replace") if found else ""
