"""A bucket as SGLang's /update_weights_from_tensor unpickles it, made without SGLang: importing it takes many seconds.

Its format `flattened_bucket` is a flat tensor of bytes and, for each tensor in it, an object with six attributes.
"""

import base64
import inspect
import io
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch
import torch.multiprocessing  # teaches ForkingPickler tensors
from torch import Tensor
from torch.multiprocessing import reductions

from milepost.engines.weight_buckets import Layout, named_dtype


class _DeviceTensor:
    """A GPU's tensor that another process opens. It names the device by its UUID, which SGLang's patch of
    `rebuild_cuda_tensor` looks up: processes that see other devices number them otherwise."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        _, arguments = reductions.reduce_tensor(self._tensor)
        place = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters).index("storage_device")
        uuid = str(torch.cuda.get_device_properties(self._tensor.device).uuid)
        return reductions.rebuild_cuda_tensor, (*arguments[:place], uuid, *arguments[place + 1 :])


def pickled(flat: Tensor, described: Layout) -> str:
    """The text to send. `flat` is not copied: it has to live until every engine has answered.

    Memory is shared by name: a descriptor cannot be handed over HTTP, and SGLang dies of one that it cannot open.
    """
    payload = {"flattened_tensor": _DeviceTensor(flat) if flat.is_cuda else flat, "metadata": _metadata(described)}
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        buffer = io.BytesIO()
        ForkingPickler(buffer).dump(payload)
    finally:
        torch.multiprocessing.set_sharing_strategy(before)
    return base64.b64encode(buffer.getvalue()).decode()


def _metadata(described: Layout) -> list[SimpleNamespace]:
    found, begin = [], 0
    for row in described:
        dtype, shape = named_dtype(row["dtype"]), torch.Size(row["shape"])
        size = shape.numel() * dtype.itemsize
        place = {"start_idx": begin, "end_idx": begin + size, "numel": size}
        found.append(SimpleNamespace(name=row["name"], shape=shape, dtype=dtype, **place))
        begin += size
    return found
