"""A model under training, as one rank has it: its slice, the optimizer of that, and what it has applied."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from megatron.core.models.gpt import GPTModel
from torch import Tensor

from milepost.engines.megatron_memory import kept_tensors, scratch_tensors
from milepost.engines.megatron_model import build_optimizer, set_rates, wrap_model
from milepost.engines.protocols import UpdateResult
from milepost.engines.schedule import learning_rate
from milepost.storage.training import OptimizerSection, PerfSection


@dataclass(frozen=True)
class Progress:
    """How far a model is: optimizer steps that were applied, and the result of the last batch."""

    optimizer_steps: int = 0
    last: UpdateResult | None = None


class TrainedModel:
    """`gpt` with its weights loaded, which from now on only steps change. All ranks take them together."""

    def __init__(self, gpt: GPTModel, optimizer: OptimizerSection, perf: PerfSection) -> None:
        self.gpt, self.wrapped = gpt, wrap_model(gpt)
        self.optimizer: Any = build_optimizer(self.wrapped, optimizer, perf)
        self.progress = Progress()
        self._section = optimizer
        self._results: dict[str, UpdateResult] = {}

    def result(self, key: str) -> UpdateResult | None:
        """What came of the batch that was applied under `key`; None when none was."""
        return self._results.get(key)

    def learn(
        self, gradients: Callable[[], dict[str, float]], section: dict[str, Any]
    ) -> tuple[bool, dict[str, float]]:
        """One optimizer step down what `gradients` adds to the gradient buffers, if that and the loss are finite.

        `section` is the optimizer's for this step, empty for that which it was built with. Returned are whether the
        step was taken, and what `gradients` says of the batch with norm and rate.
        """
        self.zero_gradients()
        settings = OptimizerSection(**section) if section else self._section
        metrics, rate = gradients(), learning_rate(self.progress.optimizer_steps, settings)
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        applied = math.isfinite(norm) and math.isfinite(metrics["loss"])
        if applied:
            set_rates(self.optimizer, settings, lr=rate)
            self.optimizer.step()
        return applied, metrics | {"grad_norm": norm, "lr": rate}

    def record(
        self, key: str, applied: bool, metrics: dict[str, float], rows: dict[str, Any] | None = None
    ) -> UpdateResult:
        """Remember what came of the batch under `key`."""
        steps = self.progress.optimizer_steps + applied
        result = UpdateResult(key, applied, steps, metrics, rows)
        self._results[key] = result
        self.progress = Progress(steps, result)
        return result

    def go_on_from(self, progress: Progress) -> None:
        """Weights and optimizer are those of `progress` now; batches that were applied after it are not."""
        self.progress = progress
        self._results = {progress.last.key: progress.last} if progress.last else {}

    def zero_gradients(self) -> None:
        self.wrapped.zero_grad_buffer()
        self.optimizer.zero_grad()

    def kept(self) -> Iterator[Tensor]:
        """What a step goes on from."""
        return kept_tensors(self.gpt, self.optimizer)

    def scratch(self) -> Iterator[Tensor]:
        """What every step begins by zeroing."""
        return scratch_tensors(self.optimizer)
