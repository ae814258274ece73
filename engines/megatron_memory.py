"""A trainer's tensors off its GPU while rollout engines use it, and back, bit for bit.

Storages are emptied and filled again in place, so that every view that Megatron holds of them stays what it is.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from milepost.engines.megatron_model import parts


def kept_tensors(model: torch.nn.Module, optimizer: Any) -> Iterator[Tensor]:
    """Weights, float32 main weights and Adam's moments: what a step goes on from."""
    yield from model.parameters()
    yield from model.buffers()
    for part in parts(optimizer):
        yield from (buffer.param_data for buffer in part.buffers if buffer.param_data is not None)
        for group in part.optimizer.param_groups:
            yield from group["params"]
        for state in part.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def scratch_tensors(optimizer: Any) -> Iterator[Tensor]:
    """Gradients, which every step begins by zeroing."""
    for part in parts(optimizer):
        yield from (buffer.grad_data for buffer in part.buffers)


def _whole(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class Parked:
    """Storages whose bytes are in the host's memory, or nowhere. The host's memory is kept for the next time."""

    def __init__(self) -> None:
        self._host: dict[int, Tensor] = {}  # by place in the order of the storages, which is the same each time
        self._kept: list[torch.UntypedStorage] = []
        self._scratch: list[tuple[torch.UntypedStorage, int]] = []

    @property
    def is_released(self) -> bool:
        return bool(self._kept or self._scratch)

    def release(self, kept: Iterable[Tensor], scratch: Iterable[Tensor]) -> None:
        """Empty the storages of both; only the bytes of `kept` come back. Does nothing when they are empty already."""
        if self.is_released:
            return
        known: set[int] = set()
        self._scratch = [(storage, storage.nbytes()) for storage in _storages(scratch, known)]
        self._kept = list(_storages(kept, known))
        for place, storage in enumerate(self._kept):
            self._host_copy(place, storage).copy_(_whole(storage), non_blocking=True)
        _wait()
        for storage in [*self._kept, *(storage for storage, _ in self._scratch)]:
            storage.resize_(0)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def resume(self) -> None:
        """Fill the storages again; gradients are zeros. Does nothing when they are full already."""
        for storage, size in self._scratch:
            storage.resize_(size)
            _whole(storage).zero_()
        for place, storage in enumerate(self._kept):
            storage.resize_(self._host[place].numel())
            _whole(storage).copy_(self._host[place], non_blocking=True)
        _wait()
        self._kept, self._scratch = [], []

    def _host_copy(self, place: int, storage: torch.UntypedStorage) -> Tensor:
        held = self._host.get(place)
        if held is None or held.numel() != storage.nbytes():
            pinned = storage.device.type == "cuda"
            self._host[place] = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu", pin_memory=pinned)
        return self._host[place]


def _storages(tensors: Iterable[Tensor], known: set[int]) -> Iterator[torch.UntypedStorage]:
    """The storages of `tensors` that are not `known`, each once."""
    for tensor in tensors:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address and address not in known:
            known.add(address)
            yield storage


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
