"""Forward and backward passes over micro-batches through Megatron's schedules, on any layout of ranks."""

from collections.abc import Iterator, Mapping
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

from milepost.engines.loss_inputs import Denominators, Loss, LossInputs, count
from milepost.engines.loss_params import wants_entropy
from milepost.engines.megatron_batch import MicroBatch, Sample
from milepost.engines.megatron_logprobs import VocabSlice, taken_logprobs, taken_logprobs_and_entropy
from milepost.engines.model_layout import ModelShape


class Passes:
    """How this rank runs its model: at which temperature, and which columns of the logits it has."""

    def __init__(
        self, model: DistributedDataParallel, shape: ModelShape, temperature: float, *, compiled: bool
    ) -> None:
        ranks, rank = (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_tensor_model_parallel_rank(),
        )
        first = shape.padded_vocab(ranks) // ranks * rank
        columns = VocabSlice(shape.vocab, first, parallel_state.get_tensor_model_parallel_group(), compiled=compiled)
        self._model, self._rotary = model, model.module.rotary_pos_emb
        self._how: dict[str, Any] = {"temperature": temperature, "columns": columns}

    def logprobs(self, batches: list[MicroBatch]) -> dict[int, NDArray[np.float32]]:
        """Log-probabilities of the response tokens of all data-parallel ranks' samples by row, on every rank."""

        def collect(batch: MicroBatch, logits: Tensor) -> tuple[MicroBatch, Tensor]:
            return batch, self._taken(batch, logits)[0]

        with torch.no_grad():
            found = self._run(batches, collect, forward_only=True)
        own = [_by_row(batch, taken.cpu().numpy()) for batch, taken in found]
        return {row: values for part in _from_last_stage(own) for row, values in part.items()}

    def gradients(
        self, batches: list[MicroBatch], loss: Loss, params: Mapping[str, Any], whole: Denominators
    ) -> dict[str, float]:
        """Add the gradient of the batch loss to the gradient buffers; the loss and metrics of the whole batch."""

        def share(batch: MicroBatch, logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            taken = self._taken(batch, logits, entropy=wants_entropy(params))
            outputs = loss(_loss_inputs(batch, whole, *taken), params)
            return outputs.loss, {"loss": outputs.loss.detach().clone(), **outputs.metrics}

        # Read only when every micro-batch is on its way: each reading waits for the GPU.
        found = self._run(batches, share, forward_only=False)
        return _sums(_from_last_stage([{name: float(value) for name, value in part.items()} for part in found]))

    def _taken(self, batch: MicroBatch, logits: Tensor, *, entropy: bool = False) -> tuple[Tensor, ...]:
        """Log-probabilities of the response tokens and, when asked for, the entropies they were taken at."""
        where = logits.flatten(0, 1), batch.positions, batch.targets
        found = taken_logprobs_and_entropy(*where, **self._how) if entropy else (taken_logprobs(*where, **self._how),)
        return tuple(_of_all_chunks(batch, values) for values in found)

    def _run(self, batches: list[MicroBatch], on_logits: Any, *, forward_only: bool) -> list[Any]:
        """What `on_logits(batch, logits)` said of each micro-batch on the last stage; nothing on the others."""

        def forward(batches_left: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[Tensor, Any]:
            batch = next(batches_left)
            self._rotary.places = batch.places
            output = model(input_ids=batch.tokens, position_ids=None, attention_mask=batch.boundaries)

            def finish(logits: Tensor, non_loss_data: bool = False) -> Any:
                if non_loss_data:
                    return on_logits(batch, logits)
                loss, metrics = on_logits(batch, logits)
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


def _of_all_chunks(batch: MicroBatch, values: Tensor) -> Tensor:
    """`values` at this rank's targets, and those of the other context-parallel ranks at theirs, as whole samples.

    All these ranks compute the same loss of them; each takes back the gradient at its own, so that it counts once.
    """
    if batch.own is None:
        return values
    placed = values.new_zeros(batch.cells.shape).index_copy(0, batch.own, values)
    found: Tensor = reduce_from_tensor_model_parallel_region(placed, parallel_state.get_context_parallel_group())
    return found


def _loss_inputs(batch: MicroBatch, whole: Denominators, logprobs: Tensor, entropy: Tensor | None = None) -> LossInputs:
    columns = batch.columns

    def at_tokens(values: Tensor) -> Tensor:
        padded = torch.zeros_like(columns["advantages"])
        return padded.view(-1).index_copy(0, batch.cells, values).view_as(padded)

    return LossInputs(
        logprobs=at_tokens(logprobs),
        old_logprobs=columns["old_logprobs"],
        rollout_logprobs=columns.get("rollout_logprobs"),
        ref_logprobs=columns.get("ref_logprobs"),
        advantages=columns["advantages"],
        loss_mask=columns["loss_mask"],
        denominators=whole,
        importance_weights=columns.get("importance_weights"),
        entropy=None if entropy is None else at_tokens(entropy),
    )


def denominators(samples: list[Sample]) -> Denominators:
    """Samples and trained tokens of the whole optimizer batch."""
    return count([sample.columns["loss_mask"] for sample in samples])


def _by_row(batch: MicroBatch, values: NDArray[np.float32]) -> dict[int, NDArray[np.float32]]:
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
