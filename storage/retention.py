"""Which checkpoints stay: the newest few, every Mth, and those that a pin names. The newest complete one always does.

A removal takes the manifest away first, so that a half-removed checkpoint is never trusted; a copy of it stays. Weights
that were exported from a checkpoint go with it.
"""

import re
from collections.abc import Set

from milepost.storage import checkpoints, files
from milepost.storage.exports import remove_exports
from milepost.storage.runs import RunFolder

PIN_NAME_CHARACTERS = 128

_PIN_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{PIN_NAME_CHARACTERS - 1}}}")


def _pins(folder: RunFolder) -> str:
    """Beside the checkpoints, not in them: pins stay when a damaged checkpoint is saved again."""
    return files.join(folder.uri, "checkpoints", "pins")


def pin(folder: RunFolder, version: int, name: str, reason: str) -> None:
    """Keep the checkpoint of `version` until the pin's file is deleted; the same name again replaces the reason."""
    if not _PIN_NAME.fullmatch(name):
        raise ValueError(f"pin {name!r} cannot name a file: take letters, digits, '.', '_' and '-'")
    if not files.exists(files.join(folder.checkpoint(version), checkpoints.MANIFEST)):
        held = ", ".join(str(number) for number in checkpoints.complete(folder, hashes=False)) or "none"
        raise LookupError(f"run {folder.run_id!r} has no checkpoint of version {version}, complete are: {held}")
    uri = files.join(_pins(folder), f"{version:06d}", f"{name}.json")
    files.publish_json(uri, {"version": version, "name": name, "reason": reason}, overwrite=True)


def unpin(folder: RunFolder, version: int, name: str) -> None:
    """Take a pin away, if it is there."""
    fs, path = files.filesystem(files.join(_pins(folder), f"{version:06d}", f"{name}.json"))
    if fs.exists(path):
        fs.rm_file(path)


def pinned(folder: RunFolder, name: str = "") -> set[int]:
    """Versions with a pin of that name, or with any."""
    numbers = (number for number in files.names(_pins(folder)) if number.isdigit())
    pins = {int(number): files.names(files.join(_pins(folder), number)) for number in numbers}
    return {number for number, found in pins.items() if (f"{name}.json" in found if name else found)}


def removed(folder: RunFolder) -> set[int]:
    """Versions whose checkpoint retention took away: named in step manifests, and rightly gone."""
    names = files.names(files.join(folder.uri, "checkpoints", "removed"))
    return {int(name.removesuffix(".json")) for name in names if name.removesuffix(".json").isdigit()}


def retain(folder: RunFolder, *, keep_last: int, keep_every: int = 0, also: Set[int] = frozenset()) -> list[int]:
    """Remove the other checkpoints older than the newest complete one; returns their versions.

    Stay: the `keep_last` newest complete ones, those of versions that `keep_every` divides (0: none), pinned ones and
    `also`. Folders without a manifest are left-overs of a save or removal that did not end, and go in any case. To be
    called when the step that saved the newest one is closed: until then the run goes back to one before it.
    """
    whole = checkpoints.complete(folder, hashes=False)
    if not whole:
        return []
    kept = {*whole[-max(keep_last, 1) :], *pinned(folder), *also}
    older = [number for number in checkpoints.numbers(folder) if number < whole[-1]]
    unneeded = [number for number in older if number not in kept and not _is_kept_by_count(folder, number, keep_every)]
    for number in unneeded:
        _remove(folder, number)
    _sweep(folder, newest=whole[-1])
    remove_exports(folder)
    return unneeded


def _is_kept_by_count(folder: RunFolder, number: int, keep_every: int) -> bool:
    has_manifest = files.exists(files.join(folder.checkpoint(number), checkpoints.MANIFEST))
    return keep_every > 0 and number % keep_every == 0 and has_manifest


def _remove(folder: RunFolder, number: int) -> None:
    uri = folder.checkpoint(number)
    path = files.join(uri, checkpoints.MANIFEST)
    if files.exists(path):
        note = files.join(folder.uri, "checkpoints", "removed", f"{number:06d}.json")
        files.publish(note, files.read(path), overwrite=True)
        checkpoints.withdraw(folder, number)
    files.remove_folder(uri)
    files.remove_folder(files.join(_pins(folder), f"{number:06d}"))  # empty, and nobody can pin it any more


def _sweep(folder: RunFolder, *, newest: int) -> None:
    """Remove the temporary folders of saves that were killed.

    Of a workspace apart from the run only the newest checkpoint stays, for engines that have to start again.
    """
    fs, path = files.filesystem(files.join(folder.workspace, "checkpoints"))
    apart = folder.workspace != folder.uri
    for found in fs.ls(path, detail=False) if fs.exists(path) else []:
        name = str(found).rstrip("/").rsplit("/", 1)[-1]
        is_temporary = name.startswith(".") and name.endswith((".tmp", ".old"))
        if is_temporary or (apart and name != f"{newest:06d}"):
            fs.rm(found, recursive=True)
