"""The weights of the reference policy, which take the place of the trained ones for as long as they are asked."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from milepost.engines.hf_folder import HfFolder
from milepost.engines.megatron_weights import load_weights
from milepost.engines.model_layout import ModelShape


class ReferenceWeights:
    """Those of a model folder, until the policy takes their place; each rank has its slice, in the host's memory.

    `began` is the digest of those of the folder, once known, and `renewed` the name of what has taken their place.
    """

    def __init__(self, model: torch.nn.Module, shape: ModelShape, folder: str) -> None:
        self._model, self._shape, self._folder = model, shape, folder
        self._kept: list[Tensor] | None = None
        self.began, self.renewed = "", ""

    @contextlib.contextmanager
    def in_place(self, *, keep: bool = False) -> Iterator[None]:
        """The model with these weights inside the block. With `keep` they are read from their folder once for all."""
        trained = [parameter.detach().clone() for parameter in self._model.parameters()]
        try:
            if self._kept is None:
                load_weights(self._model, self._shape, HfFolder(self._folder))
            else:
                self._put(self._kept)
            if keep and self._kept is None:
                self.take()
            yield
        finally:
            self._put(trained)

    def take(self) -> None:
        """The model as it is now becomes the reference."""
        self._kept = [parameter.detach().to("cpu", copy=True) for parameter in self._model.parameters()]

    def forget(self) -> None:
        """Those of the folder are the reference again."""
        self._kept = None

    @torch.no_grad()
    def _put(self, weights: list[Tensor]) -> None:
        for parameter, values in zip(self._model.parameters(), weights, strict=True):
            parameter.copy_(values)
