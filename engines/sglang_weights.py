"""Folders of weights on their way into an SGLang server: checked in full first, because the server checks little.

It loads what it finds, keeps what it does not find, and cannot go back once it has begun.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from milepost.engines.digest import weights_digest
from milepost.storage import files

TIED = "lm_head.weight"


def folder_digest(folder: str) -> str:
    """The digest of a folder's weights, read one tensor at a time."""
    tied = ties_embeddings(folder)
    return weights_digest(item for item in _tensors(folder) if not (tied and item[0] == TIED))


def ties_embeddings(folder: str) -> bool:
    """Whether the output layer is the input embedding, by the folder's configuration."""
    return bool(files.read_json(str(Path(folder, "config.json"))).get("tie_word_embeddings", False))


def check_folder(folder: str, *, like: str, digest: str) -> None:
    """ValueError unless `folder` has the names and shapes of the model folder `like` and its content has `digest`."""
    found, wanted = _shapes(folder), _shapes(like)
    for shapes in (found, wanted):
        if ties_embeddings(like):
            shapes.pop(TIED, None)
    missing, extra = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    if missing or extra:
        raise ValueError(f"the weights in {folder!r} are not this model's: missing {missing[:3]}, unknown {extra[:3]}")
    for name, shape in wanted.items():
        if found[name] != shape:
            raise ValueError(f"tensor {name!r} in {folder!r} has shape {found[name]}, this model's has {shape}")
    if (has := folder_digest(folder)) != digest:
        raise ValueError(f"the weights in {folder!r} have digest {has}, expected {digest}: export again")


def _shapes(folder: str) -> dict[str, tuple[int, ...]]:
    return {name: tuple(file.get_slice(name).get_shape()) for file in _open_files(folder) for name in file.keys()}


def _tensors(folder: str) -> Iterator[tuple[str, torch.Tensor]]:
    for file in _open_files(folder):
        for name in file.keys():
            yield name, file.get_tensor(name)


def _open_files(folder: str) -> Iterator["safe_open"]:
    paths = sorted(Path(folder).glob("*.safetensors"))
    if not paths:
        raise ValueError(f"{folder!r} holds no .safetensors files: give a Hugging Face model folder")
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                yield file
        except SafetensorError as error:
            raise ValueError(f"{str(path)!r} is damaged ({error}): write it again") from error
