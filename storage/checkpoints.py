"""Checkpoints that can be trusted: `checkpoint.json`, published last, names every file with its size and SHA-256.

No pointer says which one is the latest, so none can be stale: it is the highest number whose files are those its
manifest names. The manifest stores no path, so a run that is moved or copied keeps its checkpoints. Engines save and
restore in the run's workspace: where that is not the run itself, files are uploaded from it and fetched into it.
"""

import hashlib
import logging
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from milepost.storage import files
from milepost.storage.runs import RunFolder
from milepost.storage.weight_version import WeightVersion

MANIFEST = "checkpoint.json"
_FILES_AT_ONCE = 4  # hashing and transfers leave the interpreter lock

_log = logging.getLogger(__name__)
_R = TypeVar("_R")


class DamagedCheckpoint(ValueError):
    """A checkpoint is not what was saved: a part is missing or has changed."""


@dataclass(frozen=True)
class CheckpointRef:
    """A saved trainer state: its folder, the weights in it, and the key of the last batch applied to them.

    `layout` is how it was split when saved: ranks by kind of parallelism.
    """

    uri: str
    version: WeightVersion
    last_key: str
    layout: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class StoredFile:
    """What a file of a checkpoint must be."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class CheckpointManifest:
    """What `checkpoint.json` holds, beside its own digest. `files` are by path inside the checkpoint's folder."""

    run_id: str
    version: WeightVersion
    last_key: str
    layout: dict[str, int]
    files: dict[str, StoredFile]


def _stored_names(uri: str) -> list[str]:
    """Every file under `uri`, Megatron's hidden one included; the manifest and what a killed publish left are not."""
    fs, path = files.filesystem(uri)
    fs.invalidate_cache()
    start = len(path.rstrip("/")) + 1
    names = (str(found)[start:] for found in fs.find(path))
    return sorted(name for name in names if MANIFEST not in name)


def _measure(uri: str) -> StoredFile:
    fs, path = files.filesystem(uri)
    with fs.open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        file.seek(0, os.SEEK_END)
        return StoredFile(int(file.tell()), digest)


def _of_each(names: Iterable[str], do: Callable[[str], _R]) -> dict[str, _R]:
    chosen = list(names)
    with ThreadPoolExecutor(_FILES_AT_ONCE) as pool:
        return dict(zip(chosen, pool.map(do, chosen), strict=True))


def _measure_all(uri: str, names: Iterable[str]) -> dict[str, StoredFile]:
    return _of_each(names, lambda name: _measure(files.join(uri, name)))


def _own_digest(content: dict[str, Any]) -> str:
    rest = {name: value for name, value in content.items() if name != "digest"}
    return files.digest_of(files.canonical_json(rest).encode())


def publish(folder: RunFolder, ref: CheckpointRef) -> CheckpointManifest:
    """Make a saved state a checkpoint. Its files are hashed here, once; the engine has made them durable before."""
    uri, expected = folder.checkpoint(ref.version.step), folder.trainer_state(ref.version.step)
    if ref.uri != expected:
        raise ValueError(f"version {ref.version} was saved at {ref.uri!r}, a checkpoint of it belongs at {expected!r}")
    if files.exists(files.join(uri, MANIFEST)):
        raise files.AlreadyPublished(uri)
    stored = _measure_all(ref.uri, _stored_names(ref.uri))
    if not stored:
        raise DamagedCheckpoint(f"checkpoint {ref.uri!r} has no files: save it again")
    if uri != ref.uri:
        fs, path = files.filesystem(uri)
        _of_each(stored, lambda name: fs.put_file(files.join(ref.uri, name), files.join(path, name)))
    manifest = CheckpointManifest(folder.run_id, ref.version, ref.last_key, ref.layout, stored)
    content = asdict(manifest)
    files.publish_json(files.join(uri, MANIFEST), content | {"digest": _own_digest(content)})
    return manifest


def _read_manifest(uri: str) -> CheckpointManifest | str:
    """The manifest of the checkpoint at `uri`, or what is wrong with it."""
    path = files.join(uri, MANIFEST)
    if not files.exists(path):
        return f"it has no {MANIFEST}, so it was never completed"
    try:
        content = files.read_json(path)
    except ValueError:
        return f"{MANIFEST} is not JSON"
    if not isinstance(content, dict) or content.pop("digest", None) != _own_digest(content):
        return f"{MANIFEST} has changed since it was published"
    stored = {name: StoredFile(**entry) for name, entry in content["files"].items()}
    return CheckpointManifest(**content | {"version": WeightVersion(**content["version"]), "files": stored})


def load_manifest(uri: str) -> CheckpointManifest:
    """The manifest of the checkpoint at `uri`; DamagedCheckpoint when there is none or it is not as published."""
    manifest = _read_manifest(uri)
    if isinstance(manifest, str):
        raise damaged(uri, [manifest])
    return manifest


def damaged(uri: str, wrong: list[str]) -> DamagedCheckpoint:
    """The error for `faults` that were found."""
    return DamagedCheckpoint(f"checkpoint {uri!r} cannot be used: {'; '.join(wrong)}: restore it from a copy")


def faults(uri: str, *, hashes: bool = True) -> list[str]:
    """What is wrong with the checkpoint at `uri`, a clause each; empty when it is complete.

    Files that the manifest does not name are never opened, and no fault. Without `hashes` only names and sizes count.
    """
    manifest = _read_manifest(uri)
    if isinstance(manifest, str):
        return [manifest]
    fs, path = files.filesystem(uri)
    fs.invalidate_cache()
    sizes = {str(name): entry["size"] for name, entry in fs.find(path, detail=True).items()}
    found = {name: sizes.get(files.join(path, name)) for name in manifest.files}
    wrong = {name: f"{name} is missing" for name, size in found.items() if size is None}
    wrong |= {
        name: f"{name} has {size} bytes instead of {manifest.files[name].bytes}"
        for name, size in found.items()
        if size is not None and size != manifest.files[name].bytes
    }
    if hashes:
        measured = _measure_all(uri, (name for name in manifest.files if name not in wrong))
        changed = (name for name, stored in measured.items() if stored != manifest.files[name])
        wrong |= {name: f"{name} has changed since it was saved" for name in changed}
    return [wrong[name] for name in sorted(wrong)]


def require_complete(uri: str) -> CheckpointManifest:
    """The manifest of the checkpoint at `uri`, every file verified; DamagedCheckpoint names what is wrong."""
    wrong = faults(uri)
    if wrong:
        raise damaged(uri, wrong)
    return load_manifest(uri)


def numbers(folder: RunFolder) -> list[int]:
    """Every version that has a folder, complete or not, in order."""
    return sorted(int(name) for name in files.names(files.join(folder.uri, "checkpoints")) if name.isdigit())


def _faults_of(folder: RunFolder, number: int, *, hashes: bool = True) -> list[str]:
    uri = folder.checkpoint(number)
    wrong = faults(uri, hashes=hashes)
    if wrong:
        return wrong
    manifest = load_manifest(uri)
    if (manifest.run_id, manifest.version.step) != (folder.run_id, number):
        return [f"it is version {manifest.version} of run {manifest.run_id!r}"]
    return []


def complete(folder: RunFolder, *, hashes: bool = True) -> list[int]:
    """The versions whose checkpoint is complete, in order."""
    return [number for number in numbers(folder) if not _faults_of(folder, number, hashes=hashes)]


def latest(folder: RunFolder, *, at_most: int | None = None) -> CheckpointRef | None:
    """The newest complete checkpoint of a version up to `at_most`, every file verified; None when there is none.

    It is in the run's workspace, where an engine can restore it. One that is damaged or half-written is passed over
    with a warning that says what is wrong with it.
    """
    for number in reversed(numbers(folder)):
        if at_most is not None and number > at_most:
            continue
        wrong = _fetch(folder, number)
        if not wrong:
            return reference(folder, number)
        _log.warning("checkpoint %s is passed over: %s", folder.checkpoint(number), "; ".join(wrong))
    return None


def fetched(folder: RunFolder, number: int) -> CheckpointRef:
    """The checkpoint of one version in the run's workspace, every file verified; DamagedCheckpoint if it cannot be."""
    if wrong := _fetch(folder, number):
        raise damaged(folder.checkpoint(number), wrong)
    return reference(folder, number)


def _fetch(folder: RunFolder, number: int) -> list[str]:
    """Bring a checkpoint's files into the workspace, unless they are there; what is wrong with any of them."""
    uri, here = folder.checkpoint(number), folder.trainer_state(number)
    wrong = _faults_of(folder, number, hashes=uri == here)
    if wrong or uri == here:
        return wrong
    stored = load_manifest(uri).files
    _of_each(stored, lambda name: _download(files.join(uri, name), Path(here, name), stored[name]))
    files.publish(files.join(here, MANIFEST), files.read(files.join(uri, MANIFEST)), overwrite=True)
    return faults(here)


def _download(uri: str, target: Path, expected: StoredFile) -> None:
    if target.exists() and _measure(str(target)) == expected:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    fs, path = files.filesystem(uri)
    fs.get_file(path, str(target))


def reference(folder: RunFolder, number: int) -> CheckpointRef:
    """The checkpoint of a version as its manifest describes it, where an engine restores it."""
    manifest = load_manifest(folder.checkpoint(number))
    return CheckpointRef(folder.trainer_state(number), manifest.version, manifest.last_key, manifest.layout)


def holds(folder: RunFolder, version: WeightVersion) -> bool:
    """Whether there is a complete checkpoint of exactly these weights."""
    number = version.step
    return not _faults_of(folder, number) and reference(folder, number).version == version


def withdraw(folder: RunFolder, number: int) -> None:
    """Take the manifest away, so that what follows is no checkpoint however far a removal or a new save comes."""
    fs, path = files.filesystem(files.join(folder.checkpoint(number), MANIFEST))
    if fs.exists(path):
        fs.rm_file(path)
