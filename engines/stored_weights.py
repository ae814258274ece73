"""Weights that lie in a folder as engines load them: nobody has to hold a model to hand them out."""

from collections.abc import Sequence
from dataclasses import dataclass

from milepost.engines.protocols import ExportKind, PushReport, WeightSource, WeightVersion
from milepost.storage.parameters import SyncSection


def model_folder_weights(model_dir: str) -> WeightSource:
    """A model folder as what engines load, named as engines that start with it name it."""
    from milepost.engines.sglang_weights import folder_digest

    return WeightSource(model_dir, WeightVersion(0, folder_digest(model_dir)))


@dataclass(frozen=True)
class StoredWeights:
    """See WeightHolder. Nothing is written: the folder is the export."""

    source: WeightSource

    def weights(self, uri: str, step: int, kind: ExportKind = "full") -> WeightSource:
        return self.source

    def export(self, uri: str, version: WeightVersion) -> WeightSource | None:
        return self.source if version == self.source.version else None

    def push(self, urls: Sequence[str], step: int, sync: SyncSection) -> PushReport:
        raise ValueError(f"weights in a folder cannot be sent by sync.transport={sync.transport!r}: engines load them")
