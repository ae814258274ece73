"""The critic: a model of the policy's shape that says, before each token, how much reward is still to come.

It is trained beside the policy, in the same processes and the same layout, and has its own optimizer.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from milepost.engines.hf_folder import HfFolder
from milepost.engines.loss_inputs import Denominators, LossOutputs
from milepost.engines.megatron_batch import MicroBatch, Sample, value_columns
from milepost.engines.megatron_model import build_model, device
from milepost.engines.megatron_passes import OfTokens, Passes, at_tokens, of_all_chunks
from milepost.engines.megatron_trained import TrainedModel
from milepost.engines.megatron_weights import load_weights
from milepost.engines.model_layout import ModelShape
from milepost.engines.protocols import UpdateParams
from milepost.engines.value_loss import value_loss
from milepost.storage.parameters import ModelSection
from milepost.storage.training import PerfSection

if TYPE_CHECKING:
    from milepost.engines.train_actors import CriticSetup


class ValueHead(torch.nn.Module):
    """A number for each token, in the place of a model's output layer; in float32, whatever the weights are.

    It begins at zero, and so do all values: the first optimizer step moves the head alone, and what is known of
    language is not lost to the gradients of a random head. It is whole on every tensor-parallel rank, and small.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self._split = config.sequence_parallel
        zeros = torch.zeros(1, config.hidden_size, dtype=config.params_dtype, device=device())
        self.weight = torch.nn.Parameter(zeros)
        # Each rank then has the gradient of its part of the tokens, and Megatron adds them up.
        self.weight.sequence_parallel = self._split  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        """Values of all tokens, flat as `[batch, time]` is, of hidden states `[time, batch, hidden]`."""
        values = torch.nn.functional.linear(hidden.float(), self.weight.float()).squeeze(-1)
        if self._split:
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values.transpose(0, 1).flatten()


class Critic:
    """This rank's slice of the critic, as it is when a run begins."""

    def __init__(self, setup: "CriticSetup", shape: ModelShape, model: ModelSection, perf: PerfSection) -> None:
        own = replace(shape, tied=False)
        gpt = build_model(own, model, perf)
        if gpt.post_process:
            gpt.output_layer = ValueHead(gpt.config)
        load_weights(gpt, own, HfFolder(setup.model_dir), without_head=True)
        self.shape = replace(own, vocab=1)  # of which operations are counted
        self.model = TrainedModel(gpt, setup.optimizer, perf)
        self._passes = Passes(self.model.wrapped)

    def values(self, batches: list[MicroBatch]) -> OfTokens:
        """Values of the states before the response tokens of all data-parallel ranks' samples, on every rank."""
        return self._passes.of_tokens(batches, self._values)

    def columns(self, samples: list[Sample]) -> list[str]:
        """What of a batch its loss is made of."""
        return value_columns(samples)

    def gradients(self, batches: list[MicroBatch], update: UpdateParams, whole: Denominators) -> dict[str, float]:
        """Add the gradient of the batch's value loss to the gradient buffers; loss and metrics of the whole batch."""

        def share(batch: MicroBatch, hidden: Tensor) -> LossOutputs:
            return value_loss(
                at_tokens(batch, self._values(batch, hidden)),
                old_values=batch.columns["values"],
                returns=batch.columns["returns"],
                loss_mask=batch.columns["loss_mask"],
                denominators=whole,
                **update.params,
            )

        return self._passes.gradients(batches, share)

    def _values(self, batch: MicroBatch, hidden: Tensor) -> Tensor:
        return of_all_chunks(batch, self.model.gpt.output_layer(hidden)[batch.positions])
