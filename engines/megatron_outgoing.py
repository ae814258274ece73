"""The weights of all ranks on their way out of a trainer: into a digest, into a folder, into running engines.

Every method is called on all ranks, as every rank takes part in gathering; rank 0 reads what is gathered.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from milepost.engines.digest import weights_digest
from milepost.engines.megatron_weights import gather_weights, hf_names
from milepost.engines.model_layout import ModelShape
from milepost.engines.protocols import ExportKind, PushReport, WeightSource, WeightVersion
from milepost.engines.weight_buckets import Named
from milepost.engines.weight_carriers import Carrier, open_carrier
from milepost.engines.weight_exports import Exports
from milepost.engines.weight_push import push_tensors
from milepost.storage.parameters import SyncSection


class OutgoingWeights:
    """What `model` holds when a method is called. Engines that were sent weights stay connected until it is closed."""

    def __init__(self, model: torch.nn.Module, shape: ModelShape, exports: Exports) -> None:
        self._model, self._shape, self._exports = model, shape, exports
        self._carriers: dict[str, Carrier] = {}

    def digest(self) -> str:
        """Of the weights, the same on every rank."""
        tensors = self._gathered(to_cpu=False)
        return _agreed(weights_digest(tensors) if dist.get_rank() == 0 else _drain(tensors))

    def write(self, uri: str, kind: ExportKind) -> str:
        """Write a folder at `uri`; the digest of what is in it, the same on every rank."""
        tensors = self._gathered(to_cpu=True)
        return _agreed(self._exports.write(tensors, uri, kind) if dist.get_rank() == 0 else _drain(tensors))

    def written(self, uri: str, version: WeightVersion) -> WeightSource:
        """The folder that was just written, under its version."""
        return self._exports.named(uri, version)

    def push(self, urls: Sequence[str], version: WeightVersion, sync: SyncSection) -> PushReport | None:
        """Send the weights, whose digest is in `version`, into the engines at `urls`; None on all ranks but rank 0.

        They are gathered once more than for the digest, on the device. Hashing is twenty times slower than sending and
        only a few buckets may be alive: engines that were sent tensors as they are hashed would wait for the hashing.
        """
        tensors = self._gathered(to_cpu=False)
        if dist.get_rank() != 0:
            _drain(tensors)
            return None
        carrier = self._carriers.setdefault(sync.transport, open_carrier(sync.transport))
        return push_tensors(tensors, urls, version, names=hf_names(self._shape), sync=sync, carrier=carrier)

    def close(self) -> None:
        for carrier in self._carriers.values():
            carrier.close()

    def _gathered(self, *, to_cpu: bool) -> Iterator[Named]:
        return gather_weights(self._model, self._shape, to_cpu=to_cpu)


def _agreed(value: str) -> str:
    """Rank 0's `value`, on every rank."""
    values: list[Any] = [value]
    dist.broadcast_object_list(values, src=0)
    agreed: str = values[0]
    return agreed


def _drain(tensors: Iterator[Named]) -> str:
    """Take part in gathering weights that rank 0 reads."""
    for _ in tensors:
        pass
    return ""
