"""What a policy's passes are for: log-probabilities of taken tokens, and the gradient of a policy loss."""

from collections.abc import Mapping
from typing import Any

from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from milepost.engines.loss_inputs import Denominators, Loss, LossInputs, LossOutputs, count
from milepost.engines.loss_params import wants_entropy
from milepost.engines.megatron_batch import MicroBatch, Sample
from milepost.engines.megatron_head import of_all_tokens, output_layer
from milepost.engines.megatron_logprobs import taken_logprobs, taken_logprobs_and_entropy
from milepost.engines.megatron_passes import OfTokens, Passes, at_tokens, of_all_chunks
from milepost.engines.model_layout import ModelShape


class PolicyPasses:
    """How this rank runs its policy: at which temperature, and which part of its output layer it has."""

    def __init__(
        self, model: DistributedDataParallel, shape: ModelShape, temperature: float, *, compiled: bool
    ) -> None:
        self._passes, self._model, self._temperature = Passes(model), model.module, temperature
        self.layer = output_layer(model.module, shape, compiled=compiled)

    def logprobs(self, batches: list[MicroBatch]) -> OfTokens:
        """Log-probabilities of the response tokens of all data-parallel ranks' samples by row, on every rank."""
        return self._passes.of_tokens(batches, lambda batch, hidden: self._taken(batch, hidden)[0])

    def gradients(
        self, batches: list[MicroBatch], loss: Loss, params: Mapping[str, Any], whole: Denominators
    ) -> dict[str, float]:
        """Add the gradient of the batch loss to the gradient buffers; the loss and metrics of the whole batch."""

        def share(batch: MicroBatch, hidden: Tensor) -> LossOutputs:
            taken = self._taken(batch, hidden, entropy=wants_entropy(params))
            return loss(_loss_inputs(batch, whole, *taken), params)

        return self._passes.gradients(batches, share)

    def _taken(self, batch: MicroBatch, hidden: Tensor, *, entropy: bool = False) -> tuple[Tensor, ...]:
        """Log-probabilities of the response tokens and, when asked for, the entropies they were taken at."""
        assert self.layer is not None  # what has hidden states to read is the last stage
        where = of_all_tokens(self._model, hidden), batch.positions, batch.targets
        how: dict[str, Any] = {"temperature": self._temperature, "layer": self.layer}
        found = taken_logprobs_and_entropy(*where, **how) if entropy else (taken_logprobs(*where, **how),)
        return tuple(of_all_chunks(batch, values) for values in found)


def _loss_inputs(batch: MicroBatch, whole: Denominators, logprobs: Tensor, entropy: Tensor | None = None) -> LossInputs:
    columns = batch.columns
    return LossInputs(
        logprobs=at_tokens(batch, logprobs),
        old_logprobs=columns["old_logprobs"],
        rollout_logprobs=columns.get("rollout_logprobs"),
        ref_logprobs=columns.get("ref_logprobs"),
        advantages=columns["advantages"],
        loss_mask=columns["loss_mask"],
        denominators=whole,
        importance_weights=columns.get("importance_weights"),
        entropy=None if entropy is None else at_tokens(batch, entropy),
    )


def denominators(samples: list[Sample]) -> Denominators:
    """Samples and trained tokens of the whole optimizer batch."""
    return count([sample.columns["loss_mask"] for sample in samples])
