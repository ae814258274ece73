"""Weights as what changed since a version before: a folder with `delta.bin` and, complete last, `delta.json`.

A folder of changes names its base, which is another such folder or a full Hugging Face folder, so that whoever holds
neither rebuilds everything from the full one.
"""

import shutil
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import IO, Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from milepost.engines.digest import combined_digest, tensor_digest
from milepost.engines.hf_export import local_path, publish_folder
from milepost.engines.protocols import WeightSource
from milepost.engines.weight_buckets import as_bytes
from milepost.engines.weight_folders import MANIFEST
from milepost.storage import files

ZSTD_LEVEL = 1
SPARSE = 0.125  # share of changed elements under which positions and values are tried too
_CODEC = pa.Codec("zstd", compression_level=ZSTD_LEVEL)


def write_delta(
    tensors: Iterable[tuple[str, Tensor]], snapshot: dict[str, Tensor], base: WeightSource, uri: str
) -> str:
    """Write what in `tensors` differs from `snapshot`, the content of `base`; the digest of all tensors.

    `snapshot` holds the new tensors afterwards.
    """
    target = local_path(uri)
    temporary = target.parent / f".{target.name}.{uuid.uuid4().hex}.tmp"
    temporary.mkdir(parents=True)
    try:
        digests: dict[str, str] = {}
        with open(temporary / "delta.bin", "wb") as file:
            rows = [_append(row, file) for row in _changes(tensors, snapshot, digests)]
        manifest = {"digest": combined_digest(digests), "base": asdict(base), "tensors": rows}
        files.publish_json(str(temporary / MANIFEST), manifest)
        publish_folder(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return combined_digest(digests)


def _changes(
    tensors: Iterable[tuple[str, Tensor]], snapshot: dict[str, Tensor], digests: dict[str, str]
) -> Iterator[dict[str, Any]]:
    for name, tensor in tensors:
        digests[name] = tensor_digest(tensor)
        if not torch.equal(as_bytes(tensor), as_bytes(snapshot[name])):
            mode, payload = encode(tensor, snapshot[name])
            yield {"name": name, "digest": digests[name], "mode": mode, "payload": payload}
            snapshot[name] = tensor


def _append(row: dict[str, Any], file: IO[bytes]) -> dict[str, Any]:
    """`row` with its payload moved to the file, and where it is there."""
    payload = row.pop("payload")
    place = {"offset": file.tell(), "bytes": len(payload)}
    file.write(payload)
    return row | place


def encode(new: Tensor, old: Tensor) -> tuple[str, bytes]:
    """The shorter of two ways to say how `new` differs from `old`.

    `xor`: the bits that changed, first bytes of all elements first. `overwrite`: gaps between the positions of
    changed elements (uint32), then their new bytes. Both compressed.
    """
    width = new.dtype.itemsize
    after, before = _words(new, width), _words(old, width)
    planes = np.bitwise_xor(after, before).view(np.uint8).reshape(-1, width).T
    found = [("xor", _CODEC.compress(np.ascontiguousarray(planes), asbytes=True))]
    positions = np.flatnonzero(after != before)
    if len(positions) < SPARSE * after.size and after.size < 2**32:
        gaps = np.diff(positions, prepend=0).astype(np.uint32)
        values = after[positions].view(np.uint8).reshape(-1, width).T
        body = len(positions).to_bytes(8, "little") + gaps.tobytes() + values.tobytes()
        found.append(("overwrite", len(body).to_bytes(8, "little") + _CODEC.compress(body, asbytes=True)))
    return min(found, key=lambda one: len(one[1]))


def decode(mode: str, payload: bytes, old: Tensor) -> Tensor:
    """`new` of `encode`, from what it said and `old`."""
    width = old.dtype.itemsize
    before = _words(old, width)
    if mode == "xor":
        planes = np.frombuffer(_CODEC.decompress(payload, before.nbytes, asbytes=True), np.uint8)
        changed = np.ascontiguousarray(planes.reshape(width, -1).T).view(before.dtype).reshape(-1)
        after = np.bitwise_xor(before, changed)
    else:
        body = _CODEC.decompress(payload[8:], int.from_bytes(payload[:8], "little"), asbytes=True)
        count = int.from_bytes(body[:8], "little")
        positions = np.cumsum(np.frombuffer(body, np.uint32, count, 8).astype(np.int64))
        values = np.frombuffer(body, np.uint8, count * width, 8 + 4 * count).reshape(width, -1).T
        after = before.copy()
        after[positions] = np.ascontiguousarray(values).view(before.dtype).reshape(-1)
    return torch.from_numpy(after.view(np.uint8)).view(old.dtype).reshape(old.shape)


def _words(tensor: Tensor, width: int) -> Any:
    """The elements as unsigned numbers of their width."""
    return as_bytes(tensor).numpy().view({1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[width])
