"""Exported folders by what they say of themselves, without reading a weight: full, or changes to a base."""

from milepost.engines.protocols import WeightSource
from milepost.storage import files

MANIFEST = "delta.json"


def base_of(uri: str) -> WeightSource | None:
    """What the changes in a folder are to be applied to; None for a full folder."""
    path = files.join(uri, MANIFEST)
    return WeightSource.parse(files.read_json(path)["base"]) if files.exists(path) else None


def full_folder(uri: str) -> str:
    """The full folder that the changes in `uri` go back to."""
    base = base_of(uri)
    return uri if base is None else full_folder(base.uri)


def folder_bytes(uri: str) -> int:
    filesystem, path = files.filesystem(uri)
    return int(filesystem.du(path))
