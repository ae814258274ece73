"""Who works on a run: numbered claims in the run folder, and a heartbeat while the owner lives.

The number of a claim is the fence of everything its owner commits. A claim is made by create-exclusive, so two
processes cannot make the same one, and an owner that is not the newest any more is refused before it publishes.
"""

import contextlib
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field

import psutil

from milepost.storage import files
from milepost.storage.runs import RunFolder

Clock = Callable[[], float]

EXPIRY_SECONDS = 60.0

_BEAT_SECONDS = 5.0
_START_TOLERANCE_SECONDS = 5.0
_log = logging.getLogger(__name__)


class LeaseHeld(RuntimeError):
    """Another process works on the run."""


class LeaseLost(RuntimeError):
    """Another process took the run over while this one was away; what it does now no longer counts."""


@dataclass(frozen=True)
class Owner:
    """A process. `space` is where its pid means something: one boot of a machine and one pid namespace."""

    host: str
    space: str
    pid: int
    started: float

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


@dataclass(frozen=True)
class Claim:
    """The content of `lease/<fence>.json`. `id` tells it from every other claim; times are Unix seconds."""

    fence: int
    id: str
    owner: Owner
    claimed_at: float


def _pid_space() -> str:
    """Empty where the system does not say; two containers may share a host name and a pid, but not this."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def this_process() -> Owner:
    process = psutil.Process()
    return Owner(socket.gethostname(), _pid_space(), process.pid, process.create_time())


def is_gone(owner: Owner) -> bool:
    """Whether `owner` has ended, as far as can be seen from here: never true for a process of another host."""
    if (owner.host, owner.space) != (socket.gethostname(), _pid_space()):
        return False
    try:
        process = psutil.Process(owner.pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return True
        return abs(process.create_time() - owner.started) > _START_TOLERANCE_SECONDS
    except psutil.NoSuchProcess:
        return True


def _lease_uri(run_uri: str, fence: int, kind: str) -> str:
    return files.join(run_uri, "lease", f"{fence:06d}.{kind}")


def newest_fence(run_uri: str) -> int:
    """The number of the newest claim on a run, 0 when there is none. One listing of a small folder."""
    claims = (name.removesuffix(".json") for name in files.names(files.join(run_uri, "lease")) if name.endswith("json"))
    return max(map(int, claims), default=0)


def read_claim(run_uri: str, fence: int) -> Claim:
    content = files.read_json(_lease_uri(run_uri, fence, "json"))
    return Claim(**{**content, "owner": Owner(**content["owner"])})


def check_fence(run_uri: str, fence: int) -> None:
    """LeaseLost unless `fence` is the newest claim on the run."""
    newest = newest_fence(run_uri)
    if newest == fence:
        return
    taken = f"claim {newest} of {read_claim(run_uri, newest).owner} replaced it" if newest else "it was deleted"
    raise LeaseLost(f"claim {fence} on {run_uri} is lost, {taken}: end this process, nothing more of it is stored")


@dataclass(frozen=True)
class Note:
    """A word beside a claim. `flow_run` is what shows the run, and `api` the server that it is shown by, if any is."""

    says: str = ""
    flow_run: str = ""
    api: str = ""


def note(run_uri: str, fence: int, word: str, *, flow_run: str = "", api: str = "") -> None:
    """Leave a word beside a claim for whoever asks how the run stands: it is for people, and no reason to fail."""
    try:
        content = asdict(Note(word, flow_run, api))
        files.publish_json(_lease_uri(run_uri, fence, "note"), content, overwrite=True)
    except OSError as error:
        _log.warning("%r is not noted beside claim %d on %s: %s", word, fence, run_uri, error)


def noted(run_uri: str) -> Note:
    """What was noted last beside the newest claim."""
    uri = _lease_uri(run_uri, newest_fence(run_uri), "note")
    return Note(**files.read_json(uri)) if files.exists(uri) else Note()


def is_released(run_uri: str, fence: int) -> bool:
    """Whether the owner of a claim has given it back in order."""
    return files.exists(_lease_uri(run_uri, fence, "released"))


def _last_beat(run_uri: str, claim: Claim) -> float:
    try:
        return float(files.read_json(_lease_uri(run_uri, claim.fence, "beat"))["time"])
    except FileNotFoundError:
        return claim.claimed_at


@dataclass(frozen=True)
class Holder:
    """Who has made the newest claim and not released it, and whether that process can still be working."""

    owner: Owner
    silent_seconds: float
    works: bool


def holder(run_uri: str, *, expiry_seconds: float = EXPIRY_SECONDS, clock: Clock = time.time) -> Holder | None:
    """Who has a run: None when nobody ever had, or the last one gave it back."""
    return _holder(run_uri, newest_fence(run_uri), expiry_seconds=expiry_seconds, clock=clock)


def _holder(run_uri: str, fence: int, *, expiry_seconds: float, clock: Clock) -> Holder | None:
    if fence == 0 or is_released(run_uri, fence):
        return None
    claim = read_claim(run_uri, fence)
    silent = clock() - _last_beat(run_uri, claim)
    return Holder(claim.owner, silent, works=silent <= expiry_seconds and not is_gone(claim.owner))


def _refuse_if_held(run_uri: str, fence: int, *, expiry_seconds: float, clock: Clock) -> None:
    """LeaseHeld unless claim `fence` is released, its owner is gone, or its heartbeat is older than the expiry."""
    found = _holder(run_uri, fence, expiry_seconds=expiry_seconds, clock=clock)
    if found is None or not found.works:
        return
    raise LeaseHeld(
        f"{found.owner} works on {run_uri}, and was last heard of {found.silent_seconds:.0f} s ago: let it finish, "
        f"end it, or wait until it has been silent for {expiry_seconds:.0f} s"
    )


def _publish_claim(run_uri: str, claim: Claim) -> bool:
    """Whether the claim is ours. A retried request can meet its own first attempt, so the id decides."""
    try:
        files.publish_json(_lease_uri(run_uri, claim.fence, "json"), asdict(claim))
    except files.AlreadyPublished:
        return read_claim(run_uri, claim.fence).id == claim.id
    return True


def _claim(run_uri: str, *, expiry_seconds: float, clock: Clock) -> Claim:
    while True:
        newest = newest_fence(run_uri)
        _refuse_if_held(run_uri, newest, expiry_seconds=expiry_seconds, clock=clock)
        claim = Claim(newest + 1, uuid.uuid4().hex, this_process(), clock())
        if _publish_claim(run_uri, claim):
            return claim


@dataclass(frozen=True)
class Lease:
    """The right to work on a run, for as long as no newer claim is made."""

    run_uri: str
    fence: int
    clock: Clock
    _stopped: threading.Event = field(default_factory=threading.Event, repr=False)

    def check(self) -> None:
        """LeaseLost when another process has taken the run over."""
        check_fence(self.run_uri, self.fence)

    def beat(self) -> None:
        content = {"time": self.clock()}
        files.publish_json(_lease_uri(self.run_uri, self.fence, "beat"), content, overwrite=True)

    def _beat_on(self, seconds: float) -> None:
        while not self._stopped.wait(seconds):
            try:
                self.check()
                self.beat()
            except LeaseLost as error:
                _log.warning("%s", error)
                return
            except Exception as error:  # every storage library has errors of its own; the next beat tries again
                _log.warning("no heartbeat to %s: %s", self.run_uri, error)

    def _release(self) -> None:
        """An owner that cannot say that it is done is taken for gone: no reason to fail what it did."""
        try:
            files.publish(_lease_uri(self.run_uri, self.fence, "released"), b"", overwrite=True)
        except OSError as error:
            _log.warning("claim %d on %s is not marked as released: %s", self.fence, self.run_uri, error)


@contextlib.contextmanager
def hold(folder: RunFolder, *, expiry_seconds: float = EXPIRY_SECONDS, clock: Clock = time.time) -> Iterator[Lease]:
    """Own `folder` inside the `with` block; LeaseHeld when another process does.

    The clocks of all hosts have to agree to well within `expiry_seconds`. A thread beats, so a blocked main thread
    keeps the lease and a stopped process loses it.
    """
    claim = _claim(folder.uri, expiry_seconds=expiry_seconds, clock=clock)
    lease = Lease(folder.uri, claim.fence, clock)
    seconds = min(_BEAT_SECONDS, expiry_seconds / 6)
    thread = threading.Thread(target=lease._beat_on, args=(seconds,), name="lease", daemon=True)
    thread.start()
    try:
        yield lease
    finally:
        lease._stopped.set()
        thread.join(timeout=_BEAT_SECONDS)
        lease._release()
