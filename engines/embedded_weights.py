"""Weights between a Hugging Face folder and a live model: checked in full before the first is changed, in place."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file, save_file

from milepost.storage import files


def live_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The tensors that make a model, by name; one that is tied to an earlier one is left out."""
    seen: set[int] = set()
    live = {}
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen or not tensor.numel():
            seen.add(tensor.data_ptr())
            live[name] = tensor
    return live


def read_folder(uri: str) -> dict[str, torch.Tensor]:
    """Every tensor of a folder's safetensors files. Raises ValueError when there are none or one is damaged."""
    names = [name for name in files.names(uri) if name.endswith(".safetensors")]
    if not names:
        raise ValueError(f"{uri!r} holds no .safetensors files: give a Hugging Face model folder")
    tensors: dict[str, torch.Tensor] = {}
    for name in names:
        path = files.join(uri, name)
        try:
            tensors |= load_file(Path(files.filesystem(path)[1])) if files.is_local(uri) else load(files.read(path))
        except SafetensorError as error:
            raise ValueError(f"{path!r} is damaged ({error}): write it again") from error
    return tensors


def check_fit(tensors: Mapping[str, torch.Tensor], live: Mapping[str, torch.Tensor], *, uri: str) -> None:
    """Raise ValueError unless the names and shapes are the live model's."""
    missing, extra = sorted(live.keys() - tensors.keys()), sorted(tensors.keys() - live.keys())
    if missing or extra:
        raise ValueError(f"the weights in {uri!r} are not this model's: missing {missing[:3]}, unknown {extra[:3]}")
    for name, tensor in live.items():
        if tensors[name].shape != tensor.shape:
            found, wanted = tuple(tensors[name].shape), tuple(tensor.shape)
            raise ValueError(f"tensor {name!r} in {uri!r} has shape {found}, this model's has {wanted}")


def untied(tensors: Mapping[str, torch.Tensor], model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The tensors without those that are tied to another in `model`."""
    tied = model.state_dict().keys() - live_tensors(model).keys()
    return {name: tensor for name, tensor in tensors.items() if name not in tied}


@torch.no_grad()
def copy_into(live: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in live.items():
        tensor.copy_(tensors[name])


def write_folder(model: Any, directory: Path) -> None:
    """Write a transformers model as a folder, unquantized: its configuration and one safetensors file."""
    config = model.config
    config.architectures = [type(model).__name__]
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.save_pretrained(directory)
    tensors = {name: tensor.contiguous() for name, tensor in live_tensors(model).items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
