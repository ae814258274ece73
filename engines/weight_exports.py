"""The folders that a trainer writes its weights to: full ones, or changes since the last with a full one at times."""

from collections.abc import Iterable, Iterator

from torch import Tensor

from milepost.engines.hf_export import export_folder
from milepost.engines.protocols import ExportKind, WeightSource, WeightVersion
from milepost.engines.weight_buckets import Named
from milepost.engines.weight_delta import write_delta

FULL_EVERY = 16  # exports: whoever holds no base reads at most so many folders


class Exports:
    """Remembers the tensors of the last export of kind `delta`, in as much memory as the weights take."""

    def __init__(self, model_dir: str, dtype: str) -> None:
        self._model_dir, self._dtype = model_dir, dtype
        self._snapshot: dict[str, Tensor] = {}
        self._last: WeightSource | None = None  # whose content the snapshot is
        self._base: WeightSource | None = None
        self._since_full = 0
        self._kind: ExportKind = "full"

    def write(self, tensors: Iterable[Named], uri: str, kind: ExportKind) -> str:
        """Write `tensors` at `uri`; their digest."""
        last, self._kind, self._base = self._last, kind, None
        if kind == "full":
            return export_folder(tensors, uri, model_dir=self._model_dir, dtype=self._dtype)
        self._last = None  # until the snapshot is whole again
        if last is None or last.uri == uri or self._since_full + 1 >= FULL_EVERY:
            self._snapshot, self._since_full = {}, 0
            return export_folder(self._kept(tensors), uri, model_dir=self._model_dir, dtype=self._dtype)
        self._since_full += 1
        self._base = last
        return write_delta(tensors, self._snapshot, last, uri)

    def named(self, uri: str, version: WeightVersion) -> WeightSource:
        """What was just written, under its version."""
        source = WeightSource(uri, version, self._base.version if self._base else None)
        if self._kind == "delta":
            self._last = source
        return source

    def _kept(self, tensors: Iterable[Named]) -> Iterator[Named]:
        for name, tensor in tensors:
            self._snapshot[name] = tensor
            yield name, tensor
