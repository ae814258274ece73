"""Trainer state in Megatron's distributed format: models, optimizers and random streams, loadable in another layout.

Nothing in a checkpoint is opened before storage.checkpoints has found every file as it was saved.
"""

import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from milepost.engines import megatron_model_state as model_state
from milepost.engines.hf_export import publish_folder
from milepost.engines.megatron_reference import ReferenceWeights
from milepost.engines.megatron_trained import TrainedModel
from milepost.storage import checkpoints, files
from milepost.storage.checkpoints import DamagedCheckpoint as DamagedCheckpoint

_INDEX, _REFERENCE, _CRITIC = "milepost.json", "reference", "critic"


@dataclass(frozen=True)
class TrainerState:
    """What of a trainer is saved, and is what it was when loaded."""

    policy: TrainedModel
    critic: TrainedModel | None
    reference: ReferenceWeights

    @property
    def models(self) -> list[TrainedModel]:
        return [self.policy, self.critic] if self.critic else [self.policy]

    @property
    def last_key(self) -> str:
        """Of the batch that was applied last. A critic is trained on all that the policy is, and before it."""
        last = next((model.progress.last for model in reversed(self.models) if model.progress.last), None)
        return last.key if last else ""


def save_state(folder: Path, trainer: TrainerState) -> None:
    """Write `folder` (replacing one that is there). Runs on all ranks, which share the file system.

    A critic, and the weights of a reference that was renewed, are checkpoints of their own inside. The format for any
    layout costs memory: Megatron gathers the whole optimizer state on every rank, also on a single one. Its cheaper
    format loads only at the same tensor and pipeline split, which a checkpoint must outlive.
    """
    names: list[Any] = [f".{folder.name}.{uuid.uuid4().hex}.tmp"]
    dist.broadcast_object_list(names, src=0)
    temporary, reference = folder.parent / names[0], trainer.reference
    temporary.mkdir(parents=True, exist_ok=True)
    try:
        index = model_state.save_model(temporary, trainer.policy, streams=True)
        if trainer.critic:
            index[_CRITIC] = model_state.save_model(_inner(temporary, _CRITIC), trainer.critic)
        if reference.renewed:
            with reference.in_place():
                model_state.save_weights(_inner(temporary, _REFERENCE), trainer.policy)
        dist.barrier()
        if dist.get_rank() == 0:
            index |= {"reference": reference.began, "renewed": reference.renewed, "layout": model_state.layout()}
            files.publish_json(str(temporary / _INDEX), index)
            publish_folder(temporary, folder)
        dist.barrier()
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)


def _inner(folder: Path, name: str) -> Path:
    (folder / name).mkdir(exist_ok=True)
    return folder / name


def load_state(folder: Path, trainer: TrainerState) -> str:
    """Put the state in `folder` into `trainer`, whatever layout saved it, on all ranks.

    A critic that is not in it stays as it is. Returned is the digest of the weights that the reference began with.
    """
    _require_complete(folder)
    index = _read_index(folder)
    policy, reference = trainer.policy, trainer.reference
    saved = {"context_parallel": 1, **index["layout"]}  # those of before it was known have none
    loaded = model_state.read_model(folder, policy, index, saved, streams=saved == model_state.layout())
    if index.get("renewed"):
        model_state.load_weights(folder / _REFERENCE, policy)
        reference.take()
    else:
        reference.forget()
    reference.renewed = index.get("renewed", "")
    model_state.take_model(policy, loaded, index)
    if "streams" in loaded:
        model_state.set_streams(loaded["streams"])
    if trainer.critic and _CRITIC in index:
        found = model_state.read_model(folder / _CRITIC, trainer.critic, index[_CRITIC], saved)
        model_state.take_model(trainer.critic, found, index[_CRITIC])
    began: str = index["reference"]
    return began


def _read_index(folder: Path) -> dict[str, Any]:
    if not (folder / _INDEX).exists():
        raise DamagedCheckpoint(f"checkpoint {str(folder)!r} has no {_INDEX}: another engine saved it")
    index: dict[str, Any] = files.read_json(str(folder / _INDEX))
    for name in ("optimizer_steps", "last", "reference", "layout", "optimizer_format"):
        if name not in index:
            raise model_state.incomplete(folder, f"{_INDEX} has no {name}")
    return index


def _require_complete(folder: Path) -> None:
    """Rank 0 verifies every file; all ranks raise the same error."""
    wrong: list[Any] = [checkpoints.faults(str(folder)) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(wrong, src=0)
    if wrong[0]:
        raise checkpoints.damaged(str(folder), wrong[0])
