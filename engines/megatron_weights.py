"""Hugging Face weights <-> Megatron slices, for dense Llama, Qwen2 and Qwen3.

`split` and `join` are inverse to each other: joining the slices of all tensor-parallel ranks gives back every bit.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from milepost.engines.hf_folder import HfFolder
from milepost.engines.megatron_model import device
from milepost.engines.model_layout import ModelShape

Kind = Literal["whole", "rows", "columns", "vocab", "qkv", "gate_up"]

_HEAD = "output_layer.weight"


@dataclass(frozen=True)
class Weight:
    """A Megatron parameter, the Hugging Face tensors in it, how ranks split it, and its layer if it is in one."""

    name: str
    hf_names: tuple[str, ...]
    kind: Kind
    layer: int | None = None


def weights_of(shape: ModelShape) -> list[Weight]:
    """Every weight of the model in a fixed order, each once; a tied output layer is the embedding.

    The largest come first, so that those who work on several at a time end with small ones.
    """
    found = [Weight("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "vocab")]
    if not shape.tied:
        found.append(Weight(_HEAD, ("lm_head.weight",), "vocab"))
    for layer in range(shape.layers):
        found += _layer(shape, layer)
    found.append(Weight("decoder.final_layernorm.weight", ("model.norm.weight",), "whole"))
    return found


def hf_names(shape: ModelShape) -> list[str]:
    """What `gather_weights` gathers."""
    return [name for weight in weights_of(shape) for name in weight.hf_names]


def _layer(shape: ModelShape, layer: int) -> list[Weight]:
    rows: list[tuple[str, tuple[str, ...], Kind]] = [
        ("input_layernorm.weight", ("input_layernorm.weight",), "whole"),
        ("self_attention.linear_qkv.weight", _projections("weight"), "qkv"),
        ("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), "columns"),
        ("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",), "whole"),
        ("mlp.linear_fc1.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), "gate_up"),
        ("mlp.linear_fc2.weight", ("mlp.down_proj.weight",), "columns"),
    ]
    if shape.qkv_bias:
        rows.append(("self_attention.linear_qkv.bias", _projections("bias"), "qkv"))
    if shape.qk_norm:
        rows.append(("self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",), "whole"))
        rows.append(("self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",), "whole"))
    return [
        Weight(name, tuple(f"model.layers.{layer}.{hf_name}" for hf_name in hf_names), kind, layer)
        for name, hf_names, kind in rows
    ]


def _projections(suffix: str) -> tuple[str, ...]:
    return tuple(f"self_attn.{name}_proj.{suffix}" for name in "qkv")


def split(kind: Kind, tensors: Sequence[Tensor], shape: ModelShape, *, rank: int, ranks: int) -> Tensor:
    """The slice of Hugging Face `tensors` that tensor-parallel `rank` holds."""
    if kind == "whole":
        return tensors[0]
    if kind == "columns":
        return tensors[0].chunk(ranks, dim=1)[rank]
    if kind == "vocab":
        missing = shape.padded_vocab(ranks) - tensors[0].shape[0]
        return torch.nn.functional.pad(tensors[0], (0, 0, 0, missing)).chunk(ranks)[rank]
    if kind == "gate_up":
        return torch.cat([tensor.chunk(ranks)[rank] for tensor in tensors])
    if kind == "qkv":
        tail = tensors[0].shape[1:]
        groups = [tensor.reshape(shape.kv_heads, -1, *tail).chunk(ranks)[rank] for tensor in tensors]
        return torch.cat(groups, dim=1).reshape(-1, *tail)
    return tensors[0].chunk(ranks)[rank]


def join(kind: Kind, slices: Sequence[Tensor], shape: ModelShape) -> list[Tensor]:
    """The Hugging Face tensors whose slices the tensor-parallel ranks hold, in rank order. They may be views."""
    if kind == "whole":
        return [slices[0]]
    if kind == "columns":
        return [_joined(slices, dim=1)]
    if kind == "vocab":
        return [_joined(slices)[: shape.vocab]]
    if kind == "gate_up":
        halves = [part.chunk(2) for part in slices]
        return [_joined([half[index] for half in halves]) for index in range(2)]
    if kind == "qkv":
        tail = slices[0].shape[1:]
        per_group = _joined([part.reshape(shape.kv_heads // len(slices), -1, *tail) for part in slices])
        query = shape.heads // shape.kv_heads * shape.head_dim
        parts = per_group.split([query, shape.head_dim, shape.head_dim], dim=1)
        return [part.reshape(-1, *tail) for part in parts]
    return [_joined(slices)]


def _joined(slices: Sequence[Tensor], *, dim: int = 0) -> Tensor:
    """The slices behind each other; one alone is not copied."""
    return slices[0] if len(slices) == 1 else torch.cat(list(slices), dim=dim)


def stage_of(weight: Weight, shape: ModelShape, stages: int) -> int:
    """The pipeline stage that holds `weight`; a tied embedding is held by the last stage as well."""
    if weight.layer is not None:
        return weight.layer // (shape.layers // stages)
    return 0 if weight.name.startswith("embedding.") else stages - 1


def _local_names(weight: Weight, shape: ModelShape) -> list[str]:
    """What this rank's GPTModel calls `weight`; empty when another stage has it."""
    stages, stage = (
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_rank(),
    )
    if weight.kind == "vocab" and shape.tied:
        return {0: [weight.name], stages - 1: [_HEAD]}.get(stage, []) if stages > 1 else [weight.name]
    if stage_of(weight, shape, stages) != stage:
        return []
    if weight.layer is None:
        return [weight.name]
    return [f"decoder.layers.{weight.layer % (shape.layers // stages)}.{weight.name}"]


@torch.no_grad()
def load_weights(model: torch.nn.Module, shape: ModelShape, folder: HfFolder, *, without_head: bool = False) -> None:
    """Fill this rank's slice of GPTModel `model` from a Hugging Face folder.

    With `without_head` its output layer, which is then not that of the folder, stays as it is.
    """
    rank, ranks = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
    left = {_HEAD} if without_head else set()
    parameters = {name: parameter for name, parameter in model.named_parameters() if name not in left}
    for weight in weights_of(shape):
        names = [name for name in _local_names(weight, shape) if name not in left]
        if not names:
            continue
        local = split(weight.kind, [folder.tensor(name) for name in weight.hf_names], shape, rank=rank, ranks=ranks)
        for name in names:
            _copy(parameters.pop(name), local, weight)
    assert not parameters, f"weights left unread: {sorted(parameters)}"


def _copy(parameter: Tensor, local: Tensor, weight: Weight) -> None:
    if parameter.shape != local.shape:
        found, wanted = tuple(local.shape), tuple(parameter.shape)
        raise ValueError(f"{weight.hf_names[0]} gives a slice of shape {found}, config.json asks for {wanted}")
    parameter.copy_(local)


@torch.no_grad()
def gather_weights(model: torch.nn.Module, shape: ModelShape, *, to_cpu: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Hugging Face names and tensors, on rank 0; every rank must run it to the end, the others get nothing.

    They are copies on the CPU or, without `to_cpu`, tensors of the model's device that may be the parameters
    themselves. Only one weight is whole at a time.
    """
    if parallel_state.get_data_parallel_rank(with_context_parallel=True) != 0:
        return
    stages, stage = (
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_rank(),
    )
    parameters: dict[str, Any] = dict(model.named_parameters())
    names = {weight: _local_names(weight, shape) for weight in weights_of(shape)}
    sizes = _slice_sizes({weight.hf_names[0]: parameters[found[0]].shape for weight, found in names.items() if found})
    for weight, found in names.items():
        owner = stage_of(weight, shape, stages)
        slices = _gather_slices(parameters[found[0]].detach()) if stage == owner else None
        slices = _to_first_stage(slices, owner, sizes[weight.hf_names[0]], model)
        if dist.get_rank() == 0 and slices is not None:
            whole = join(weight.kind, list(slices), shape)
            for name, part in zip(weight.hf_names, whole, strict=True):
                yield name, part.contiguous().to("cpu", copy=True) if to_cpu else part.contiguous()


def _slice_sizes(own: dict[str, torch.Size]) -> dict[str, torch.Size]:
    """The size of every stage's slices."""
    found: list[Any] = [None] * parallel_state.get_pipeline_model_parallel_world_size()
    dist.all_gather_object(found, own, group=parallel_state.get_pipeline_model_parallel_group())
    return {name: size for sizes in found for name, size in sizes.items()}


def _gather_slices(local: Tensor) -> Tensor:
    """The slices of all tensor-parallel ranks, stacked along a new first dimension."""
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    if ranks == 1:
        return local.unsqueeze(0)
    slices = local.new_empty((ranks * local.shape[0], *local.shape[1:]))
    dist.all_gather_into_tensor(slices, local.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
    return slices.view(ranks, *local.shape)


def _to_first_stage(slices: Tensor | None, owner: int, size: torch.Size, model: torch.nn.Module) -> Tensor | None:
    """`slices` of stage `owner`, on rank 0."""
    if owner == 0 or parallel_state.get_tensor_model_parallel_rank() != 0:
        return slices
    group, stage = parallel_state.get_pipeline_model_parallel_group(), parallel_state.get_pipeline_model_parallel_rank()
    if stage == owner and slices is not None:
        dist.send(slices.contiguous(), dist.get_global_rank(group, 0), group=group)
    if stage != 0:
        return None
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    received = torch.empty((ranks, *size), dtype=next(model.parameters()).dtype, device=device())
    dist.recv(received, dist.get_global_rank(group, owner), group=group)
    return received
