"""The keys and values of running sequences: one slot a row, each row filled from position 0.

Rows stay dense: when some leave, the last ones move into their places.
"""

from collections.abc import Sequence
from typing import Any

import torch

_FIRST_LENGTH = 64


class PrefillCache:
    """Collects the keys and values of a forward pass that starts at position 0: `layers[i]` is (keys, values)."""

    def __init__(self) -> None:
        self.layers: list[tuple[torch.Tensor, torch.Tensor]] = []

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.layers.append((keys, values))
        return keys, values

    def get_seq_length(self, layer: int = 0) -> int:
        return 0


class SlotCache:
    """Keys and values as one tensor [layers, 2, rows, heads, length, head_dim], grown by doubling up to its limits."""

    def __init__(self, *, layers: int, max_rows: int, max_length: int) -> None:
        self.layers = layers
        self.max_rows = max_rows
        self.max_length = max_length
        self.rows = 0
        self.length = 0  # positions that attention looks at: every row's are below it
        self._store: torch.Tensor | None = None
        self._views: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._index = torch.empty(0)

    def join(self, prefill: PrefillCache, which: torch.Tensor) -> None:
        """Add a row for each entry of `which`: an index into the rows of `prefill`."""
        keys = prefill.layers[0][0]
        first, self.rows = self.rows, self.rows + len(which)
        self.reserve(keys.shape[2])
        store = self._grown(keys, self.rows, self.length)
        for layer, pair in enumerate(prefill.layers):
            for part, tensor in enumerate(pair):
                store[layer, part, first : self.rows, :, : keys.shape[2]] = tensor[which]
        self._look()

    def reserve(self, length: int) -> None:
        """Make every row at least `length` positions long."""
        if length <= self.length:
            return
        self.length = min(self.max_length, max(_FIRST_LENGTH, 1 << (length - 1).bit_length()))
        if self._store is not None:
            self._grown(self._store[0, 0], self.rows, self.length)
            self._look()

    def keep(self, order: Sequence[int]) -> None:
        """Keep the rows in `order` (see embedded_batch.fill_holes); an empty cache gives its length back."""
        self.rows = len(order)
        moved = [(row, source) for row, source in enumerate(order) if row != source]
        if moved and self._store is not None:
            rows, sources = map(list, zip(*moved, strict=True))
            self._store[:, :, rows, :, : self.length] = self._store[:, :, sources, :, : self.length]
        if not self.rows:
            self.length = 0
        self._look()

    def release(self) -> None:
        """Free the memory; only when no row is left."""
        assert not self.rows
        self._store = None

    def write_at(self, positions: torch.Tensor) -> None:
        """Where the next forward pass writes each row's key and value: [rows]."""
        heads, width = self._views[0][0].shape[1], self._views[0][0].shape[3]
        self._index = positions[:, None, None, None].expand(-1, heads, 1, width)

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        stored_keys, stored_values = self._views[layer]
        stored_keys.scatter_(2, self._index, keys)
        stored_values.scatter_(2, self._index, values)
        return stored_keys, stored_values

    def get_seq_length(self, layer: int = 0) -> int:
        return self.length

    def _look(self) -> None:
        """Views of the rows and positions in use, one pair a layer."""
        if self._store is not None:
            used = self._store[:, :, : self.rows, :, : self.length]
            self._views = [(used[layer, 0], used[layer, 1]) for layer in range(self.layers)]

    def _grown(self, like: torch.Tensor, rows: int, length: int) -> torch.Tensor:
        """The store with room for `rows` and `length`, its content kept; `like` is [.., heads, .., head_dim]."""
        old = self._store
        old_rows, old_length = (old.shape[2], old.shape[4]) if old is not None else (0, 0)
        if old is not None and rows <= old_rows and length <= old_length:
            return old
        capacity = max(old_rows, min(self.max_rows, 1 << (rows - 1).bit_length()))
        shape = (self.layers, 2, capacity, like.shape[1], max(length, old_length), like.shape[3])
        self._store = torch.zeros(shape, dtype=like.dtype)
        if old is not None:
            self._store[:, :, :old_rows, :, :old_length] = old
        return self._store
