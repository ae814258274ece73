"""Where a model ends and its output layer begins: the model gives hidden states, and logits are made of them apart."""

from typing import Any

from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from torch import Tensor

from milepost.engines.megatron_logprobs import OutputLayer
from milepost.engines.memory_plan import LOGITS_BYTES
from milepost.engines.model_layout import ModelShape


class HiddenModel(GPTModel):  # type: ignore[misc]
    """Megatron's, up to what its output layer is given: hidden states, `[time, batch, hidden]`, on every stage.

    With sequence parallelism they are of this rank's part of the time.
    """

    def _postprocess(self, hidden_states: Tensor, **options: Any) -> Tensor:
        return hidden_states


def output_layer(model: GPTModel, shape: ModelShape, *, compiled: bool) -> OutputLayer | None:
    """That of `model`, as log-probabilities take it; None when another pipeline stage has it."""
    if not model.post_process:
        return None
    tied = model.share_embeddings_and_output_weights
    weight = model.shared_embedding_or_output_weight() if tied else model.output_layer.weight
    return OutputLayer(
        weight,
        shape.vocab,
        first=len(weight) * parallel_state.get_tensor_model_parallel_rank(),
        group=parallel_state.get_tensor_model_parallel_group(),
        compiled=compiled,
        chunk_bytes=LOGITS_BYTES if weight.is_cuda else OutputLayer.chunk_bytes,
    )


def of_all_tokens(model: GPTModel, hidden: Tensor) -> Tensor:
    """Hidden states of all tokens, `[batch * time, hidden]`, for a product with this rank's part of the output layer.

    What the tensor-parallel ranks have of their gradient is added up.
    """
    sequence = model.config.sequence_parallel
    whole = gather_from_sequence_parallel_region if sequence else copy_to_tensor_model_parallel_region
    found: Tensor = whole(hidden).transpose(0, 1).flatten(0, 1)
    return found
