"""Atomic files on any fsspec filesystem: a reader sees the whole of a file or none of it.

Local files go through a temporary file, fsync and a hard link or rename; object stores through one `pipe_file` call,
because opening for write publishes a partial file when the writer dies.
"""

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import fsspec


class AlreadyPublished(FileExistsError):
    """The file exists and `overwrite` was not asked for: somebody else published first."""


def filesystem(uri: str) -> tuple[Any, str]:
    """The fsspec filesystem of `uri` and the path on it. A cached listing would hide what other processes publish."""
    try:
        fs, path = fsspec.core.url_to_fs(uri, use_listings_cache=False)
    except ImportError as error:
        hint = ": pip install 'milepost[s3]'" if uri.startswith("s3") else ""
        raise ValueError(f"{uri!r} needs a package that is not installed ({error}){hint}") from None
    return fs, str(path)


def is_local(uri: str) -> bool:
    return type(filesystem(uri)[0]).__name__ == "LocalFileSystem"


def join(uri: str, *parts: str) -> str:
    return "/".join([uri.rstrip("/"), *parts])


def moved(ref: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """A stored reference to a file of `folder`, which may have been elsewhere when it was written."""
    return {**ref, "uri": join(folder, str(ref["uri"]).rsplit("/", 1)[-1])}


def digest_of(data: bytes) -> str:
    """SHA-256 of `data` as 64 hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def publish(uri: str, data: bytes, *, overwrite: bool = False) -> None:
    """Write `data` so that no reader ever sees a part of it; durable when this returns.

    Raises AlreadyPublished when the file exists and `overwrite` is false.
    """
    fs, path = filesystem(uri)
    if is_local(uri):
        _publish_local(Path(path), data, overwrite)
        return
    try:
        _put(fs, path, data, mode="overwrite" if overwrite else "create")
    except FileExistsError as error:
        raise AlreadyPublished(uri) from error


def _put(fs: Any, path: str, data: bytes, *, mode: str) -> None:
    """One request, and again while a store says that another one for the same path is in progress."""
    for pause in (0.1, 0.2, 0.4, 0.8, 0.0):
        try:
            fs.pipe_file(path, data, mode=mode)
            return
        except OSError as error:
            refusal = _refusal(error)
            if refusal == "PreconditionFailed":
                raise FileExistsError(path) from error
            if refusal != "ConditionalRequestConflict" or not pause:
                raise
            time.sleep(pause)


def _refusal(error: OSError) -> str:
    """The S3 code behind `error`, empty for others: not every store sends what its client needs to tell them apart."""
    response = getattr(error.__cause__, "response", None) or {}
    return str(response.get("Error", {}).get("Code", ""))


@contextlib.contextmanager
def writing(uri: str, *, overwrite: bool = False) -> Iterator[IO[bytes]]:
    """A file to write piece by piece: published when the block ends, as by `publish`, and not at all when it raises."""
    if is_local(uri):
        with _local_file(Path(filesystem(uri)[1]), overwrite) as file:
            yield file
        return
    with tempfile.NamedTemporaryFile() as whole:
        yield whole.file
        whole.flush()
        fs, path = filesystem(uri)
        try:
            fs.put_file(whole.name, path, mode="overwrite" if overwrite else "create")
        except FileExistsError as error:
            raise AlreadyPublished(uri) from error
        except OSError as error:
            if _refusal(error) == "PreconditionFailed":
                raise AlreadyPublished(uri) from error
            raise


def _publish_local(path: Path, data: bytes, overwrite: bool) -> None:
    with _local_file(path, overwrite) as file:
        file.write(data)


@contextlib.contextmanager
def _local_file(path: Path, overwrite: bool) -> Iterator[IO[bytes]]:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name}.{uuid.uuid4().hex}.tmp"
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if overwrite:
            os.replace(temporary, path)
        else:
            os.link(temporary, path)
    except FileExistsError as error:
        raise AlreadyPublished(str(path)) from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
    _sync_directory(path.parent)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(uri: str) -> bytes:
    fs, path = filesystem(uri)
    data: bytes = fs.cat_file(path)
    return data


def exists(uri: str) -> bool:
    fs, path = filesystem(uri)
    return bool(fs.exists(path))


def names(uri: str) -> list[str]:
    """Sorted base names in a folder; empty when there is no such folder. Temporary files are left out."""
    fs, path = filesystem(uri)
    try:
        entries = fs.ls(path, detail=False)
    except FileNotFoundError:
        return []
    found = (entry.rstrip("/").rsplit("/", 1)[-1] for entry in entries)
    return sorted(name for name in found if not name.startswith("."))


def temporary(uri: str) -> list[str]:
    """What killed writers left in a folder, where nobody writes now; object stores have no such files."""
    return sorted(str(path) for path in Path(filesystem(uri)[1]).glob(".*.tmp")) if is_local(uri) else []


def remove_folder(uri: str) -> None:
    fs, path = filesystem(uri)
    if fs.exists(path):
        fs.rm(path, recursive=True)


def link_folder(uri: str, target: str) -> bool:
    """Give a local folder a second name, under which it stays when the first is removed; its files take no more room.

    False when it is gone, or its file system has no links.
    """
    path = Path(target)
    temporary = path.parent / f".{path.name}.{uuid.uuid4().hex}.tmp"
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        shutil.copytree(uri, temporary, copy_function=os.link)
        os.rename(temporary, path)
    except (OSError, shutil.Error):
        return path.exists()
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return True


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces: equal values give equal text. NaN and infinity are refused."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def publish_json(uri: str, value: Any, *, overwrite: bool = False) -> None:
    publish(uri, (json.dumps(value, indent=1, allow_nan=False) + "\n").encode(), overwrite=overwrite)


def read_json(uri: str) -> Any:
    """ValueError names the file when it is not JSON: what was published is whole, so it was damaged since."""
    try:
        return json.loads(read(uri))
    except ValueError as error:
        raise ValueError(f"{uri} is not JSON ({error}): restore it from a copy") from None
