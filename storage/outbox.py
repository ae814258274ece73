"""Records on their way to somewhere else: numbered files beside the run, delivered in order, and kept.

A receiver that is down delays nothing and loses nothing: what was not delivered is delivered later, by this process or
the next. A record is sent twice only when the process died between sending and noting it; receivers match by `uid`.
"""

import contextlib
import json
import re
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from milepost.storage import files

Record = dict[str, Any]
Send = Callable[[Record], None]

RETRY_SECONDS = 5.0
IDENTITY = "outbox.json"

_FILE = re.compile(r"(\d{8})-([A-Za-z0-9._-]+)\.json")


class DeliveryFailed(OSError):
    """The receiver did not take a record now; it may take the same record later."""


class RecordRefused(ValueError):
    """The receiver will never take this record; it is passed over so that those behind it can go."""


@dataclass(frozen=True)
class Delivery:
    """What a delivery did. `waiting` records are still in the outbox, and `error` says why the first of them is."""

    sent: int
    waiting: int
    refused: tuple[str, ...] = ()
    error: str = ""


def uid_of(uri: str) -> str:
    """The uid of the outbox at `uri`; empty when nothing was ever put into it."""
    identity = files.join(uri, IDENTITY)
    return str(files.read_json(identity)["uid"]) if files.exists(identity) else ""


class Outbox:
    """The folder of records at `uri`, on any filesystem; one process appends to it."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self._lock = threading.Lock()
        self._known: dict[str, int] = {}
        self._uid = ""

    @property
    def uid(self) -> str:
        """32 hexadecimal digits that no other outbox has, a later one at the same path included."""
        if not self._uid:
            identity = files.join(self.uri, IDENTITY)
            with contextlib.suppress(files.AlreadyPublished):
                files.publish_json(identity, {"uid": uuid.uuid4().hex})
            self._uid = uid_of(self.uri)
        return self._uid

    def append(self, record: Record) -> bool:
        """Store `record` durably under its `id`. False when that id is here already: the first record stays."""
        name = record["id"]
        if not _FILE.fullmatch(f"00000000-{name}.json"):
            raise ValueError(f"record id {name!r} cannot name a file: use letters, digits, '.', '_' and '-'")
        with self._lock:
            self._known = self._known or dict(map(_parts, self.records()))
            if name in self._known:
                return False
            number = max(self._known.values(), default=0) + 1
            content = record | {"uid": f"{self.uid}/{name}"}
            files.publish_json(files.join(self.uri, f"{number:08d}-{name}.json"), content)
            self._known[name] = number
            return True

    def records(self) -> list[str]:
        """File names of all records, oldest first."""
        return [name for name in files.names(self.uri) if _FILE.fullmatch(name)]

    def ids(self) -> set[str]:
        """The ids of all records, whether they were delivered or not."""
        return {_parts(name)[0] for name in self.records()}

    def waiting(self, target: str) -> list[str]:
        """File names of the records that `target` has not taken, oldest first."""
        delivered = set(files.names(self._markers(target)))
        return [name for name in self.records() if name not in delivered]

    def has_reached(self, target: str) -> bool:
        """Whether `target` ever took a record."""
        return bool(files.names(self._markers(target)))

    def read(self, name: str) -> Record:
        """One record; RecordRefused when its file is damaged."""
        try:
            record: Record = json.loads(files.read(files.join(self.uri, name)))
        except ValueError as error:
            raise RecordRefused(f"{name} is not JSON: {error}") from error
        return record

    def mark(self, name: str, target: str, *, note: str = "") -> None:
        """Note that `target` is done with a record; `note` says why when it refused it."""
        files.publish(files.join(self._markers(target), name), note.encode(), overwrite=True)

    def _markers(self, target: str) -> str:
        return files.join(self.uri, "delivered", files.digest_of(target.encode())[:12])


def _parts(file: str) -> tuple[str, int]:
    """Id and number of a record, from the name of its file."""
    number, _, rest = file.partition("-")
    return rest.removesuffix(".json"), int(number)


def deliver(
    outbox: Outbox, send: Send, *, target: str = "mlflow", stopping: Callable[[], bool] | None = None
) -> Delivery:
    """Send what `target` has not taken, in order, up to the first failure or until `stopping` answers true."""
    waiting = outbox.waiting(target)
    sent = 0
    refused: list[str] = []
    for done, name in enumerate(waiting):
        if stopping and stopping():
            return Delivery(sent, len(waiting) - done, tuple(refused))
        try:
            send(outbox.read(name))
        except RecordRefused as error:
            outbox.mark(name, target, note=str(error))
            refused.append(f"{name}: {error}")
            continue
        except DeliveryFailed as error:
            return Delivery(sent, len(waiting) - done, tuple(refused), str(error))
        outbox.mark(name, target)
        sent += 1
    return Delivery(sent, 0, tuple(refused))


class Courier:
    """A thread that delivers an outbox while the run goes on; whoever starts it stops it.

    A receiver that is down is asked again every `retry_seconds`. Imports that `send` needs happen in the thread.
    """

    def __init__(
        self, outbox: Outbox, send: Send, *, target: str = "mlflow", retry_seconds: float = RETRY_SECONDS
    ) -> None:
        self._outbox = outbox
        self._send = send
        self._target = target
        self._retry_seconds = retry_seconds
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._expired = threading.Event()
        self._thread = threading.Thread(target=self._work, name="courier", daemon=True)
        self._done: list[Delivery] = []

    def start(self) -> None:
        self._thread.start()

    def post(self, record: Record) -> bool:
        """Append a record and return at once; see `Outbox.append`."""
        added = self._outbox.append(record)
        self._wake.set()
        return added

    def stop(self, timeout_seconds: float = 10.0) -> Delivery:
        """Deliver what is left, for at most `timeout_seconds`, and say what was done since the start."""
        self._stopping.set()
        self._wake.set()
        self._thread.join(timeout_seconds)
        self._expired.set()
        done = list(self._done)
        waiting = len(self._outbox.waiting(self._target))
        refused = tuple(reason for delivery in done for reason in delivery.refused)
        return Delivery(
            sum(delivery.sent for delivery in done), waiting, refused, self._reason(waiting, timeout_seconds)
        )

    def _reason(self, waiting: int, timeout_seconds: float) -> str:
        """Why records are left, or nothing."""
        if not waiting:
            return ""
        if self._thread.is_alive():
            return f"{self._target} did not take them within {timeout_seconds:g} s"
        return (self._done[-1].error if self._done else "") or "the courier ended early, its error is above"

    def _work(self) -> None:
        while True:
            stopping = self._stopping.is_set()
            self._wake.clear()
            delivery = deliver(self._outbox, self._send, target=self._target, stopping=self._expired.is_set)
            self._done.append(delivery)
            if stopping or self._expired.is_set():
                return
            if not self._stopping.is_set():
                self._wake.wait(self._retry_seconds if delivery.error else None)
