"""Forward and backward passes over micro-batches through Megatron's schedules, on any layout of ranks."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region
from numpy.typing import NDArray
from torch import Tensor

from milepost.engines.loss_inputs import LossOutputs
from milepost.engines.megatron_batch import MicroBatch

OfTokens = dict[int, NDArray[np.float32]]
"""A number for each response token, by row of the batch's table."""


class Passes:
    """How this rank runs a model; what is read off the model's outputs is said by whoever runs it."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model, self._rotary = model, model.module.rotary_pos_emb

    def of_tokens(self, batches: list[MicroBatch], read: Callable[[MicroBatch, Tensor], Tensor]) -> OfTokens:
        """What `read(batch, output)` says of the response tokens of all data-parallel ranks' samples, on every rank."""

        def collect(batch: MicroBatch, output: Tensor) -> tuple[MicroBatch, Tensor]:
            return batch, read(batch, output)

        with torch.no_grad():
            found = self._run(batches, collect, forward_only=True)
        own = [_by_row(batch, values.cpu().numpy()) for batch, values in found]
        return {row: values for part in _from_last_stage(own) for row, values in part.items()}

    def gradients(
        self, batches: list[MicroBatch], share: Callable[[MicroBatch, Tensor], LossOutputs]
    ) -> dict[str, float]:
        """Add the gradient of the batch loss, the sum of what `share(batch, output)` says, to the gradient buffers.

        Returned are the loss and metrics of the whole batch.
        """

        def shown(batch: MicroBatch, output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            outputs = share(batch, output)
            return outputs.loss, {"loss": outputs.loss.detach().clone(), **outputs.metrics}

        # Read only when every micro-batch is on its way: each reading waits for the GPU.
        found = self._run(batches, shown, forward_only=False)
        return _sums(_from_last_stage([{name: float(value) for name, value in part.items()} for part in found]))

    def _run(self, batches: list[MicroBatch], on_output: Any, *, forward_only: bool) -> list[Any]:
        """What `on_output(batch, output)` said of each micro-batch on the last stage; nothing on the others."""

        def forward(batches_left: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[Tensor, Any]:
            batch = next(batches_left)
            self._rotary.places = batch.places
            output = model(input_ids=batch.tokens, position_ids=None, attention_mask=batch.boundaries)

            def finish(output: Tensor, non_loss_data: bool = False) -> Any:
                if non_loss_data:
                    return on_output(batch, output)
                loss, metrics = on_output(batch, output)
                return loss, torch.zeros((), dtype=torch.int), metrics

            return output, finish

        found: list[Any] = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(batches),
            model=[self._model],
            num_microbatches=len(batches),
            seq_length=max(batch.tokens.shape[1] for batch in batches),
            micro_batch_size=max(batch.tokens.shape[0] for batch in batches),
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
        return found


def of_all_chunks(batch: MicroBatch, values: Tensor) -> Tensor:
    """`values` at this rank's targets, and those of the other context-parallel ranks at theirs, as whole samples.

    All these ranks compute the same loss of them; each takes back the gradient at its own, so that it counts once.
    """
    if batch.own is None:
        return values
    placed = values.new_zeros(batch.cells.shape).index_copy(0, batch.own, values)
    found: Tensor = reduce_from_tensor_model_parallel_region(placed, parallel_state.get_context_parallel_group())
    return found


def at_tokens(batch: MicroBatch, values: Tensor) -> Tensor:
    """`values` of whole samples where the batch's columns have theirs: `[batch, time]`, zeros elsewhere."""
    padded = torch.zeros_like(batch.columns["loss_mask"])
    return padded.view(-1).index_copy(0, batch.cells, values).view_as(padded)


def _by_row(batch: MicroBatch, values: NDArray[np.float32]) -> OfTokens:
    ends = np.cumsum([len(sample.response) for sample in batch.samples])[:-1]
    return {sample.row: part for sample, part in zip(batch.samples, np.split(values, ends), strict=False)}


def _from_last_stage(found: list[Any]) -> list[Any]:
    """The results of all data-parallel ranks, in rank order, on every rank; ranks that share samples have the same."""
    others = parallel_state.get_tensor_model_parallel_rank() + parallel_state.get_context_parallel_rank()
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, found if parallel_state.is_pipeline_last_stage() and not others else [])
    return [item for part in parts for item in part]


def _sums(parts: list[dict[str, float]]) -> dict[str, float]:
    names = list(dict.fromkeys(name for part in parts for name in part))
    return {name: float(sum(part.get(name, 0.0) for part in parts)) for name in names}
