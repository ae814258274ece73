"""The weights of a model folder as they are, for the rollout engines of a run that trains nothing.

No process holds them. They are named as the first push of a trainer of that folder names them.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from milepost.engines.fake_rank import FakeRank
from milepost.engines.protocols import ExportKind, PushReport, WeightHolder, WeightSource, WeightVersion
from milepost.storage.parameters import Parameters, SyncSection

if TYPE_CHECKING:
    from torch import Tensor

_COMPUTED = "rotary_emb.inv_freq"  # old checkpoints store what a model works out from its configuration


def frozen_model(model_dir: str, parameters: Parameters) -> WeightHolder:
    """The holder of a model folder's weights, for engines as in `parameters`."""
    if parameters.engines.rollout == "fake":
        return FakeRank(0, 1, None)
    return FrozenModel(model_dir, parameters.perf.dtype)


class FrozenModel:
    """See WeightHolder. Weights are exported in `dtype`, the type that engines compute in."""

    def __init__(self, model_dir: str, dtype: str) -> None:
        self._model_dir, self._dtype = model_dir, dtype

    def weights(self, uri: str, step: int, kind: ExportKind = "full") -> WeightSource:
        from milepost.engines.hf_export import export_folder

        digest = export_folder(self._tensors(), uri, model_dir=self._model_dir, dtype=self._dtype)
        return WeightSource(uri, WeightVersion(step, digest))

    def export(self, uri: str, version: WeightVersion) -> WeightSource | None:
        source = self.weights(uri, version.step)
        return source if source.version == version else None

    def push(self, urls: Sequence[str], step: int, sync: SyncSection) -> PushReport:
        raise ValueError(f"no trainer could send anything by sync.transport={sync.transport!r}: use 'disk'")

    def _tensors(self) -> "Iterator[tuple[str, Tensor]]":
        """What a trainer would export: a tied output layer is the embedding, and is left out."""
        import torch

        from milepost.engines.hf_folder import HfFolder

        config = json.loads(Path(self._model_dir, "config.json").read_text())
        tied = {"lm_head.weight"} if config.get("tie_word_embeddings") else set()
        for name, tensor in HfFolder(self._model_dir).named_tensors():
            if name not in tied and not name.endswith(_COMPUTED):
                yield name, tensor.to(getattr(torch, self._dtype))
