"""Folders that appear in a root when they are whole: made beside their place, and moved there at the end."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from milepost.storage import files, runs
from milepost.storage.runs import RunExists, RunFolder


@contextmanager
def staging(folder: RunFolder, what: str) -> Iterator[RunFolder]:
    """A folder for a run that is not whole: beside its place on a local filesystem, elsewhere on this machine."""
    beside = Path(folder.uri).parent if files.is_local(folder.uri) else None
    if beside:
        beside.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        prefix=f".{what}-{folder.run_id}-", dir=beside, ignore_cleanup_errors=True
    ) as path:
        yield RunFolder(files.join(path, folder.run_id), folder.run_id)


def place(staged: RunFolder, folder: RunFolder) -> None:
    """Give a whole run its place: at once, or on an object store with the record last, which makes it a run."""
    if files.is_local(folder.uri):
        try:
            os.rename(staged.uri, folder.uri)
        except OSError:
            runs.require_new(folder)
            raise
        return
    try:
        for path in sorted(Path(staged.uri).rglob("*"), key=lambda found: found.name == "run.json"):
            if path.is_file():
                files.publish(files.join(folder.uri, path.relative_to(staged.uri).as_posix()), path.read_bytes())
    except files.AlreadyPublished:  # another one of this name was quicker: what is there is its
        raise RunExists(f"run {folder.run_id!r} already exists at {folder.uri}: choose another name") from None
    except BaseException:
        files.remove_folder(folder.uri)
        raise
