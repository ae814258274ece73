"""A run is a folder: `run.json`, `steps/<n>/`, `checkpoints/`, `weights/`, `outbox/`. Where things are is said here."""

import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from milepost.storage import files, redaction
from milepost.storage.parameters import Parameters
from milepost.storage.provenance import Provenance
from milepost.storage.registry import nearest, some_of
from milepost.storage.training import as_stored

RELEASES = {1: "0.1.0", 2: "0.1.0", 3: "0.1.0"}
"""Versions of everything a run holds as JSON, with the first release that reads each. What names none is of version 1;
2 counts attempts, 3 names the schema version of every table."""

SCHEMA_VERSION = max(RELEASES)

STAMP = {"schema_version": SCHEMA_VERSION, "reader": RELEASES[SCHEMA_VERSION]}
"""Written into `run.json` and into every attempt: an older milepost tells what to install."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_R = TypeVar("_R")


class RunExists(FileExistsError):
    """A run of this name is already in the root."""


@dataclass(frozen=True)
class RunFolder:
    """Paths inside one run. `uri` is on any fsspec filesystem."""

    uri: str
    run_id: str

    @property
    def record(self) -> str:
        return files.join(self.uri, "run.json")

    @property
    def outbox(self) -> str:
        return files.join(self.uri, "outbox")

    def step(self, step: int) -> str:
        return files.join(self.uri, "steps", f"{step:06d}")

    def manifest(self, step: int) -> str:
        return files.join(self.step(step), "manifest.json")

    @property
    def workspace(self) -> str:
        """The local folder that engines read and write: the run itself, or for one elsewhere a folder of its own.

        That one is in `$MILEPOST_WORKSPACE`, which has to be shared when engines are on several hosts, or else in
        `$MILEPOST_HOME/work`. A run can always go on without what is in it.
        """
        if files.is_local(self.uri):
            return self.uri
        home = os.environ.get("MILEPOST_HOME") or Path.home() / ".milepost"
        work = os.environ.get("MILEPOST_WORKSPACE") or Path(home) / "work"
        return str(Path(work).absolute() / files.digest_of(self.uri.encode())[:16])

    def checkpoint(self, version: int) -> str:
        """Where the trainer state after `version` trained steps is kept."""
        return files.join(self.uri, "checkpoints", f"{version:06d}")

    def trainer_state(self, version: int) -> str:
        """Where an engine saves that state, and restores it from; the checkpoint itself on a local filesystem."""
        return files.join(self.workspace, "checkpoints", f"{version:06d}")

    def weights(self, version: int) -> str:
        """The weights after `version` trained steps, as a Hugging Face folder; made again when a run goes on."""
        return files.join(self.workspace, "weights", f"{version:06d}")

    def prompts(self, name: str) -> str:
        return files.join(self.uri, "prompts", name)

    @property
    def logs(self) -> str:
        """Where the processes of the run write what they log; see `storage.process_logs`."""
        return files.join(self.workspace, "logs")

    @property
    def report(self) -> str:
        return files.join(self.uri, "report.html")


def check_name(run: str) -> str:
    """`run` itself when it can name a folder everywhere; ValueError otherwise."""
    if not _NAME.fullmatch(run) or ".." in run:
        raise ValueError(
            f"run name {run!r} cannot be used: take 1 to 128 letters, digits, '.', '_' or '-', first a letter or digit"
        )
    return run


def check_root(root: str) -> str:
    """`root` itself; ValueError when it would bring what it logs in with into every stored reference."""
    if (shown := redaction.masked_text(root)) != root:
        raise ValueError(
            f"root {shown!r} holds credentials, which would be stored with every table: give them in the environment "
            "(AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY or FSSPEC_*), and the root without"
        )
    return root


def run_folder(root: str, run: str) -> RunFolder:
    check_root(root)
    return RunFolder(files.join(root, check_name(run)), run)


@dataclass(frozen=True)
class RunRecord:
    """What `run.json` holds: everything that decides what the run computes.

    `attempt` is 1 there, and `storage.attempts` counts on; `started_at` is in Unix seconds, 0 where it is not known.
    """

    run_id: str
    steps: int
    parameters: Parameters
    parameters_digest: str
    provenance: Provenance
    data: dict[str, Any]
    model: dict[str, Any]
    attempt: int = 1
    started_at: float = 0.0

    @property
    def vocabulary(self) -> int:
        """How many token ids the model has; 0 when its configuration does not say."""
        return int(self.model["config"].get("vocab_size") or 0)


def parameters_digest(parameters: Parameters) -> str:
    return files.digest_of(files.canonical_json(parameters.model_dump(mode="json")).encode())


def _taken(folder: RunFolder) -> RunExists:
    return RunExists(f"run {folder.run_id!r} already exists at {folder.uri}: choose another name")


def require_new(folder: RunFolder) -> None:
    """RunExists when a run of this name is there already, ValueError when all of it is but its record."""
    if files.exists(folder.record):
        raise _taken(folder)
    if files.names(files.join(folder.uri, "steps")):
        raise ValueError(
            f"{folder.record} is missing beside the steps of a run: restore it from a copy, or choose another name"
        )


def create(folder: RunFolder, record: RunRecord) -> None:
    """Publish `run.json`; RunExists when the name is taken, so that no run ever overwrites another."""
    content = asdict(record) | {"parameters": record.parameters.model_dump(mode="json")}
    try:
        files.publish_json(folder.record, {**STAMP, **content})
    except files.AlreadyPublished:
        raise _taken(folder) from None


def load(folder: RunFolder) -> RunRecord:
    """The record of an existing run; LookupError when there is none, ValueError when it is of another run."""
    if not files.exists(folder.record):
        raise LookupError(f"no run {folder.run_id!r}: {folder.record} does not exist{_instead(folder)}")
    record = read_record(folder.record, RunRecord)
    if record.run_id != folder.run_id:
        raise ValueError(
            f"{folder.record} is of run {record.run_id!r}, not {folder.run_id!r}: give the folder its own name back"
        )
    return replace(record, data={name: in_run(folder, value) for name, value in record.data.items()})


def run_folders(root: str) -> list[RunFolder]:
    """Every run in a root, by name."""
    found = (RunFolder(files.join(root, name), name) for name in files.names(root))
    return [folder for folder in found if files.exists(folder.record)]


def _instead(folder: RunFolder) -> str:
    """Which run may have been meant by the name of one that is not there."""
    root = folder.uri.rpartition("/")[0]
    known = [found.run_id for found in run_folders(root)]
    if not known:
        return f"; there is no run in {root!r}: name their folder with --root"
    return nearest(folder.run_id, known) or f"; {root!r} has {some_of(known)}"


def in_run(folder: RunFolder, stored: Any) -> Any:
    """A stored reference to prompts with the place that they have in `folder`; anything else as it is."""
    is_reference = isinstance(stored, dict) and "uri" in stored
    return files.moved(stored, files.join(folder.uri, "prompts")) if is_reference else stored


def _stored_parameters(content: dict[str, Any]) -> Parameters:
    return Parameters.model_validate(content | {"optimizer": as_stored(content.get("optimizer", {}))})


def read_record(uri: str, kind: Callable[..., _R]) -> _R:
    """A `kind` with parameters and provenance; ValueError when a newer milepost wrote it, or it is damaged."""
    content = files.read_json(uri)
    try:
        version, release = content.pop("schema_version", 1), content.pop("reader", "")
        if version <= SCHEMA_VERSION:
            content["parameters"] = _stored_parameters(content.get("parameters"))
            content["provenance"] = Provenance(**content.get("provenance"))
            return kind(**content)
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{uri} is not as it was written ({error}): restore it from a copy") from error
    fix = f"pip install 'milepost>={release}'" if release else "install a newer milepost"
    raise ValueError(f"{uri} has schema version {version}, this milepost knows versions up to {SCHEMA_VERSION}: {fix}")
