"""One rollout engine as a trainer that pushes weights sees it: SGLang's HTTP endpoints, all under one deadline."""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

from milepost.engines.protocols import PauseMode, WeightVersion
from milepost.engines.weight_checksums import SentTensors, checked_ranks

GIVE_UP_SECONDS = 5.0
_NOT_FOUND = 404


class PushFailed(RuntimeError):
    """An engine did not take the weights."""


class EngineLink:
    """An engine under an update. Its version label names no weights until all of them have been loaded."""

    def __init__(self, url: str, seconds_left: Callable[[], float]) -> None:
        self.url = url
        self.group = ""  # the process group it was asked to join, if any
        self._seconds_left = seconds_left
        info = self.ask("/server_info")
        self.is_embedded = info.get("engine") == "milepost"
        self.ranks = int(info.get("tp_size", 1))
        self._shares_prefixes = not self.is_embedded and not info.get("disable_radix_cache", False)

    def begin(self, version: WeightVersion, mode: PauseMode) -> None:
        """Forget what was cached and open the update. The engine is paused, in `mode`."""
        if mode != "in_place":
            self.ask("/flush_cache", {})
        elif self._shares_prefixes:
            raise PushFailed(f"{self.url} is paused in_place, which keeps what older weights cached for new requests")
        self._label(f"loading-{version}")
        self._session("/begin_weight_update")

    def finish(self, version: WeightVersion, sent: SentTensors) -> None:
        """Check what was loaded, name it and close the update."""
        if not self.is_embedded:  # which compares the digest of everything when the update is closed
            self._compare(sent)
        self._label(str(version))
        self._session("/end_weight_update")

    def give_up(self) -> None:
        """Leave nothing half open. The label stays one that names no weights."""
        until = time.monotonic() + GIVE_UP_SECONDS
        self._seconds_left = lambda: until - time.monotonic()
        for path, body in (("/destroy_weights_update_group", {"group_name": self.group}), ("/end_weight_update", {})):
            try:
                self.ask(path, body)
            except PushFailed:
                pass  # it was not that far, or is dead

    def ask(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The JSON an endpoint answers, {} for other text; PushFailed with the engine's own words when it refuses."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=max(self._seconds_left(), 0.01)) as response:
                answer = _json(response.read())
        except urllib.error.HTTPError as error:
            raise PushFailed(f"{self.url} refused {path} ({error.code}): {_words(error.read())}") from None
        except TimeoutError:
            raise PushFailed(f"{self.url} did not answer {path} before the deadline") from None
        except OSError as error:
            reason = getattr(error, "reason", error)
            late = isinstance(reason, TimeoutError)
            why = "before the deadline" if late else f"({reason})"
            raise PushFailed(f"{self.url} did not answer {path} {why}") from None
        if answer.get("success") is False:
            raise PushFailed(f"{self.url} refused {path}: {answer.get('message')}")
        return answer

    def _session(self, path: str) -> None:
        """SGLang 0.5.17 takes tensors at any time and has no sessions."""
        try:
            self.ask(path, {})
        except PushFailed as error:
            if f"({_NOT_FOUND})" not in str(error):
                raise

    def _label(self, name: str) -> None:
        self.ask("/update_weight_version", {"new_version": name, "abort_all_requests": False})

    def _compare(self, sent: SentTensors) -> None:
        checked = checked_ranks(self.ask("/weights_checker", {"action": "checksum"}))
        if len(checked) != self.ranks:
            raise PushFailed(f"{self.url} answered with the checksums of {len(checked)} of its {self.ranks} ranks")
        for found, rank, ranks in checked:
            if wrong := sent.differences(found, rank=rank, ranks=ranks):
                raise PushFailed(f"{self.url} did not load the weights: {wrong}")


def _json(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _words(text: bytes) -> str:
    """The message in an error's body."""
    found = _json(text)
    error = found.get("error")
    message = error.get("message") if isinstance(error, dict) else None
    return str(message or found.get("message") or text.decode(errors="replace")[:300])
