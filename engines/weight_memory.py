"""A bucket in memory that another process on this machine can open by name."""

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from milepost.engines.weight_buckets import Layout, byte_count, unflatten

SHARED_MEMORY = Path("/dev/shm")


class SharedBucket:
    """The memory is given back when this is closed."""

    def __init__(self, flat: Tensor, described: Layout) -> None:
        folder = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
        descriptor, self._path = tempfile.mkstemp(prefix="milepost-", dir=folder)
        os.close(descriptor)
        self.body: dict[str, Any] = {"shared_memory": self._path, "tensors": described}
        torch.from_file(self._path, shared=True, size=flat.numel(), dtype=torch.uint8).copy_(flat)

    def close(self) -> None:
        os.unlink(self._path)


def read_shared(path: str, described: Layout) -> dict[str, Tensor]:
    """Copies of the tensors in a bucket that another process has shared; ValueError when it is not there or short."""
    size = byte_count(described)
    if not os.path.isfile(path) or os.path.getsize(path) != size:
        raise ValueError(f"there is no shared memory of {size} bytes called {path!r}: push from the same machine")
    return unflatten(torch.from_file(path, shared=False, size=size, dtype=torch.uint8), described)
