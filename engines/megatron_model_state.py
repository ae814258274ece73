"""One model of a checkpoint in Megatron's distributed format: its weights, its optimizer, and random streams with it.

Every function runs on all ranks, which share the file system.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedObject
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from milepost.engines.megatron_model import parts, step_count, torch_adams
from milepost.engines.megatron_trained import Progress, TrainedModel
from milepost.engines.protocols import UpdateResult
from milepost.storage.checkpoints import DamagedCheckpoint

_ANY_LAYOUT, _SAME_SPLIT = "fully_reshardable", "dp_reshardable"  # Megatron's formats of optimizer state


def _optimizer_format(optimizer: Any) -> str:
    """Megatron's format for any layout, but where it would shift the state of every bucket after a padded one.

    That is with a tied embedding over pipeline stages, which has a bucket to itself, when its size is not a multiple of
    128 elements and of the data-parallel ranks.
    """
    buckets = [bucket for part in parts(optimizer) for buffer in part.buffers for bucket in buffer.buckets[:-1]]
    aligned: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(aligned, all(bucket.grad_data.numel() == bucket.numel_unpadded for bucket in buckets))
    return _ANY_LAYOUT if all(aligned) else _SAME_SPLIT


def _metadata(optimizer_format: str) -> dict[str, Any]:
    return {
        "distrib_optim_sharding_type": optimizer_format,
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def _streams() -> dict[str, Any]:
    """This rank's random state."""
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return {"cpu": torch.get_rng_state(), "cuda": cuda, "named": get_cuda_rng_tracker().get_states()}


def set_streams(streams: dict[str, Any]) -> None:
    torch.set_rng_state(streams["cpu"])
    if streams["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(streams["cuda"])
    get_cuda_rng_tracker().set_states(streams["named"])


def _state(model: TrainedModel, *, loading: bool, streams: bool, form: str) -> dict[str, Any]:
    """Megatron's description of who holds which part. Random streams belong to a layout and load only into the same."""
    metadata = _metadata(form)
    weights = model.gpt.sharded_state_dict(metadata=metadata)
    state = {"model": weights, "optimizer": model.optimizer.sharded_state_dict(weights, loading, metadata=metadata)}
    if streams:
        state["streams"] = ShardedObject("streams", _streams(), (dist.get_world_size(),), (dist.get_rank(),))
    return state


def _weights(model: TrainedModel) -> dict[str, Any]:
    """Megatron's description of who holds which part of the weights alone."""
    return {"model": model.gpt.sharded_state_dict(metadata=_metadata(_optimizer_format(model.optimizer)))}


def save_weights(folder: Path, model: TrainedModel) -> None:
    """Write the weights alone into `folder`."""
    dist_checkpointing.save(_weights(model), str(folder))


def load_weights(folder: Path, model: TrainedModel) -> None:
    """Put weights that were saved alone into `model`, whose optimizer stays as it is."""
    model.gpt.load_state_dict(_load_parts(folder, _weights(model))["model"])


def save_model(folder: Path, model: TrainedModel, *, streams: bool = False) -> dict[str, Any]:
    """Write model and optimizer into `folder`; for the index, how far they are and in which format."""
    form = _optimizer_format(model.optimizer)
    dist_checkpointing.save(_state(model, loading=False, streams=streams, form=form), str(folder))
    return {**asdict(model.progress), "optimizer_format": form}


def read_model(
    folder: Path, model: TrainedModel, entry: dict[str, Any], saved: dict[str, int], *, streams: bool = False
) -> dict[str, Any]:
    """What `folder` holds for this rank of `model`, which stays as it is; `entry` is of it in the index.

    ValueError where its format cannot be read in another layout than the one that it was `saved` in.
    """
    form, own = entry["optimizer_format"], layout()
    if form == _SAME_SPLIT and any(saved[kind] != own[kind] for kind in ("tensor_parallel", "pipeline_parallel")):
        split = f"tensor_parallel {saved['tensor_parallel']}, pipeline_parallel {saved['pipeline_parallel']}"
        raise ValueError(f"checkpoint {str(folder)!r} loads only with {split}")
    return _load_parts(folder, _state(model, loading=True, streams=streams, form=form))


def take_model(model: TrainedModel, loaded: dict[str, Any], entry: dict[str, Any]) -> None:
    """Have `model` go on from what was read of it, and from where its entry in the index says it was."""
    model.gpt.load_state_dict(loaded["model"])
    _load_optimizer(model.optimizer, loaded["optimizer"], entry["optimizer_steps"])
    last = UpdateResult(**entry["last"]) if entry["last"] else None
    model.go_on_from(Progress(entry["optimizer_steps"], last))


def _load_parts(folder: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """Read all that `wanted` describes. What was not saved is an error: nothing keeps the value it was built with."""
    lacking: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(lacking, unsaved(folder, wanted))
    names = sorted(set().union(*lacking))
    if names:
        raise incomplete(folder, ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else ""))
    loaded: dict[str, Any] = dist_checkpointing.load(wanted, str(folder))
    groups = {"optimizer", "param_state_sharding_type"} - loaded["optimizer"].keys() if "optimizer" in wanted else set()
    if groups:
        raise incomplete(folder, f"the optimizer's {min(groups)}")
    return loaded


def unsaved(folder: Path, wanted: dict[str, Any]) -> set[str]:
    """What this rank wants and the checkpoint does not hold; random streams are told apart by rank."""
    held = load_sharded_metadata(str(folder)).values()
    sought = [part for part in nested_values(load_preprocess(wanted)[0]) if isinstance(part, ShardedBase)]
    return {_name(part) for part in sought} - {_name(part) for part in held}


def _name(part: ShardedBase) -> str:
    return str(part.unique_key if isinstance(part, ShardedObject) else part.key)


def incomplete(folder: Path, what: str) -> DamagedCheckpoint:
    return DamagedCheckpoint(
        f"checkpoint {str(folder)!r} lacks a part of the trainer's state ({what}): use another one"
    )


@torch.no_grad()
def _load_optimizer(optimizer: Any, loaded: dict[str, Any], steps: int) -> None:
    """Load groups and moments. Megatron's loader wants no step count beside the moments, where torch's Adam has it."""
    (part,) = parts(optimizer)
    moments = loaded.pop("param_state")
    part.load_state_dict(loaded)
    for adam in torch_adams(optimizer):
        for state in adam.state.values():
            state.pop("step")
    load = {
        _ANY_LAYOUT: part.load_parameter_state_from_fully_reshardable,
        _SAME_SPLIT: part.load_parameter_state_from_dp_reshardable,
    }
    load[loaded["param_state_sharding_type"]](moments)
    for adam in torch_adams(optimizer):
        for parameter, state in adam.state.items():
            state["step"] = step_count(steps, parameter)


def layout() -> dict[str, int]:
    """How this world splits the model: ranks by kind of parallelism."""
    return {
        "tensor_parallel": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_parallel": parallel_state.get_pipeline_model_parallel_world_size(),
        "context_parallel": parallel_state.get_context_parallel_world_size(),
        "data_parallel": parallel_state.get_data_parallel_world_size(),
    }
