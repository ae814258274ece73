"""Trainer state in Megatron's distributed format: model, optimizer and random streams, loadable in another layout.

Nothing in a checkpoint is opened before storage.checkpoints has found every file as it was saved.
"""

import shutil
import uuid
from dataclasses import asdict, dataclass
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

from milepost.engines.hf_export import publish_folder
from milepost.engines.megatron_model import parts, step_count, torch_adams
from milepost.engines.megatron_reference import ReferenceWeights
from milepost.engines.protocols import UpdateResult
from milepost.storage import checkpoints, files
from milepost.storage.checkpoints import DamagedCheckpoint as DamagedCheckpoint

_INDEX, _REFERENCE = "milepost.json", "reference"
_ANY_LAYOUT, _SAME_SPLIT = "fully_reshardable", "dp_reshardable"  # Megatron's formats of optimizer state


@dataclass(frozen=True)
class Progress:
    """How far the trainer is: optimizer steps that were applied, and the result of the last batch.

    `reference` is the digest of the weights that the reference policy began with, once known, and `renewed` the name of
    those that it has since, if others.
    """

    optimizer_steps: int = 0
    last: UpdateResult | None = None
    reference: str = ""
    renewed: str = ""


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


def _set_streams(streams: dict[str, Any]) -> None:
    torch.set_rng_state(streams["cpu"])
    if streams["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(streams["cuda"])
    get_cuda_rng_tracker().set_states(streams["named"])


def _state(model: torch.nn.Module, optimizer: Any, *, loading: bool, streams: bool, form: str) -> dict[str, Any]:
    """Megatron's description of who holds which part. Random streams belong to a layout and load only into the same."""
    metadata = _metadata(form)
    weights = model.sharded_state_dict(metadata=metadata)
    state = {"model": weights, "optimizer": optimizer.sharded_state_dict(weights, loading, metadata=metadata)}
    if streams:
        state["streams"] = ShardedObject("streams", _streams(), (dist.get_world_size(),), (dist.get_rank(),))
    return state


def _weights(model: torch.nn.Module, form: str) -> dict[str, Any]:
    """Megatron's description of who holds which part of the weights alone."""
    return {"model": model.sharded_state_dict(metadata=_metadata(form))}


def save_state(
    folder: Path, model: torch.nn.Module, optimizer: Any, progress: Progress, reference: ReferenceWeights
) -> None:
    """Write `folder` (replacing one that is there). Runs on all ranks, which share the file system.

    The weights of a reference that was renewed are a checkpoint of their own inside; else its folder has them.
    The format for any layout costs memory: Megatron gathers the whole optimizer state on every rank, also on a single
    one. Its cheaper format loads only at the same tensor and pipeline split, which a checkpoint must outlive.
    """
    names: list[Any] = [f".{folder.name}.{uuid.uuid4().hex}.tmp"]
    dist.broadcast_object_list(names, src=0)
    temporary = folder.parent / names[0]
    temporary.mkdir(parents=True, exist_ok=True)
    try:
        form = _optimizer_format(optimizer)
        dist_checkpointing.save(_state(model, optimizer, loading=False, streams=True, form=form), str(temporary))
        if progress.renewed:
            (temporary / _REFERENCE).mkdir(exist_ok=True)
            with reference.in_place():
                dist_checkpointing.save(_weights(model, form), str(temporary / _REFERENCE))
        dist.barrier()
        if dist.get_rank() == 0:
            index = {**asdict(progress), "layout": layout(), "optimizer_format": form}
            files.publish_json(str(temporary / _INDEX), index)
            publish_folder(temporary, folder)
        dist.barrier()
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)


def load_state(folder: Path, model: torch.nn.Module, optimizer: Any, reference: ReferenceWeights) -> Progress:
    """Put the state in `folder` into `model`, `optimizer` and `reference`, whatever layout saved it, on all ranks."""
    _require_complete(folder)
    index = _read_index(folder)
    form, own = index["optimizer_format"], layout()
    saved = {"context_parallel": 1, **index["layout"]}  # those of before it was known have none
    if form == _SAME_SPLIT and any(saved[kind] != own[kind] for kind in ("tensor_parallel", "pipeline_parallel")):
        split = f"tensor_parallel {saved['tensor_parallel']}, pipeline_parallel {saved['pipeline_parallel']}"
        raise ValueError(f"checkpoint {str(folder)!r} loads only with {split}")
    loaded = _load_parts(folder, _state(model, optimizer, loading=True, streams=saved == own, form=form))
    if index.get("renewed"):
        model.load_state_dict(_load_parts(folder / _REFERENCE, _weights(model, form))["model"])
        reference.take()
    else:
        reference.forget()
    model.load_state_dict(loaded["model"])
    _load_optimizer(optimizer, loaded["optimizer"], index["optimizer_steps"])
    if "streams" in loaded:
        _set_streams(loaded["streams"])
    last = UpdateResult(**index["last"]) if index["last"] else None
    return Progress(index["optimizer_steps"], last, index["reference"], index.get("renewed", ""))


def _read_index(folder: Path) -> dict[str, Any]:
    if not (folder / _INDEX).exists():
        raise DamagedCheckpoint(f"checkpoint {str(folder)!r} has no {_INDEX}: another engine saved it")
    index: dict[str, Any] = files.read_json(str(folder / _INDEX))
    for name in ("optimizer_steps", "last", "reference", "layout", "optimizer_format"):
        if name not in index:
            raise _incomplete(folder, f"{_INDEX} has no {name}")
    return index


def _load_parts(folder: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """Read all that `wanted` describes. What was not saved is an error: nothing keeps the value it was built with."""
    lacking: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(lacking, unsaved(folder, wanted))
    names = sorted(set().union(*lacking))
    if names:
        raise _incomplete(folder, ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else ""))
    loaded: dict[str, Any] = dist_checkpointing.load(wanted, str(folder))
    groups = {"optimizer", "param_state_sharding_type"} - loaded["optimizer"].keys() if "optimizer" in wanted else set()
    if groups:
        raise _incomplete(folder, f"the optimizer's {min(groups)}")
    return loaded


def unsaved(folder: Path, wanted: dict[str, Any]) -> set[str]:
    """What this rank wants and the checkpoint does not hold; random streams are told apart by rank."""
    held = load_sharded_metadata(str(folder)).values()
    sought = [part for part in nested_values(load_preprocess(wanted)[0]) if isinstance(part, ShardedBase)]
    return {_name(part) for part in sought} - {_name(part) for part in held}


def _name(part: ShardedBase) -> str:
    return str(part.unique_key if isinstance(part, ShardedObject) else part.key)


def _incomplete(folder: Path, what: str) -> DamagedCheckpoint:
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


def _require_complete(folder: Path) -> None:
    """Rank 0 verifies every file; all ranks raise the same error."""
    wrong: list[Any] = [checkpoints.faults(str(folder)) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(wrong, src=0)
    if wrong[0]:
        raise checkpoints.damaged(str(folder), wrong[0])
