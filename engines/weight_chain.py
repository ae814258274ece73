"""From a folder of changes to all the weights: its bases, back to tensors that are held or to a full folder."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from milepost.engines.digest import tensor_digest
from milepost.engines.embedded_weights import read_folder
from milepost.engines.hf_export import export_folder
from milepost.engines.protocols import WeightSource
from milepost.engines.weight_delta import decode
from milepost.engines.weight_folders import MANIFEST, base_of, full_folder
from milepost.storage import files


class DeltaMismatch(ValueError):
    """What changes were applied to was not their base, or they are damaged."""


def rebuild(uri: str, held: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """All tensors of a folder. `held` are those of its base; without them, or where they do not fit, all is read.

    DeltaMismatch when a tensor does not come out as it was written. The caller checks the digest of the whole.
    """
    base = base_of(uri)
    if base is None:
        return read_folder(uri)
    if held is not None:
        try:
            return _apply(uri, held)
        except DeltaMismatch:
            pass  # what is held is not quite the base (another dtype, say), which the full folder is
    return _apply(uri, rebuild(base.uri))


def _apply(uri: str, before: Mapping[str, Tensor]) -> dict[str, Tensor]:
    manifest: dict[str, Any] = files.read_json(files.join(uri, MANIFEST))
    changes = files.read(files.join(uri, "delta.bin"))
    after = dict(before)
    for row in manifest["tensors"]:
        name, payload = row["name"], changes[row["offset"] : row["offset"] + row["bytes"]]
        found = _decoded(row["mode"], payload, before.get(name))
        if found is None or tensor_digest(found) != row["digest"]:
            raise DeltaMismatch(f"tensor {name!r} of {uri!r} does not come out as written: load a full folder")
        after[name] = found
    return after


def _decoded(mode: str, payload: bytes, before: Tensor | None) -> Tensor | None:
    """None when the payload is not of a change to `before`."""
    try:
        return None if before is None else decode(mode, payload, before)
    except (ValueError, IndexError, OSError):  # what zstd and numpy say of bytes that make no sense
        return None


def materialise(source: WeightSource, cache: Path) -> str:
    """A full Hugging Face folder with the content of `source`: its own, or one in `cache`, which then holds no other.

    The base that an earlier call left in `cache` is built on. ValueError when the content is not `source.version`.
    """
    if source.base is None:
        return source.uri
    target, base = cache / str(source.version), cache / str(source.base)
    if not target.is_dir():
        tensors = rebuild(source.uri, read_folder(str(base)) if base.is_dir() else None)
        _write(source, tensors, target)
    for other in cache.iterdir():
        if other != target:
            shutil.rmtree(other)
    return str(target)


def _write(source: WeightSource, tensors: Mapping[str, Tensor], target: Path) -> None:
    full = full_folder(source.uri)
    dtype = files.read_json(files.join(full, "config.json"))["dtype"]
    digest = export_folder(tensors.items(), str(target), model_dir=full, dtype=dtype)
    if digest != source.version.digest:
        shutil.rmtree(target)
        raise ValueError(f"{source.uri!r} gives weights {digest}, expected {source.version.digest}: export again")
