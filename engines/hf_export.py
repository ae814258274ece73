"""Weights written as a Hugging Face folder that transformers and rollout engines load: complete, or absent.

`.complete` is written last, with the digest of the weights: for whoever waits for a folder that is copied elsewhere.
"""

import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from milepost.engines.conversion import COMPLETE
from milepost.engines.digest import weights_digest
from milepost.storage import files

SHARD_BYTES = 4 * 1000**3
_COPIED = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


def local_path(uri: str) -> Path:
    """The path behind `uri`; ValueError unless it is on this machine's file system."""
    if not files.is_local(uri):
        raise ValueError(f"{uri!r} is not a local path: weights and trainer state are written to local paths")
    return Path(files.filesystem(uri)[1])


def export_folder(
    tensors: Iterable[tuple[str, Tensor]], uri: str, *, model_dir: str, dtype: str, shard_bytes: int = SHARD_BYTES
) -> str:
    """Write named `tensors` beside what `model_dir` has but weights, and return their digest.

    The folder appears under its name only when it is complete; one that is there is replaced.
    """
    with new_folder(local_path(uri)) as folder:
        digest = weights_digest(_write_shards(tensors, folder, shard_bytes))
        copy_side_files(Path(model_dir), folder, dtype)
        (folder / COMPLETE).write_text(digest)
    return digest


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder to fill: it appears as `target` at the end of the block, and not at all after an error in it."""
    temporary = target.parent / f".{target.name}.{uuid.uuid4().hex}.tmp"
    temporary.mkdir(parents=True)
    try:
        yield temporary
        publish_folder(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_shards(
    tensors: Iterable[tuple[str, Tensor]], folder: Path, shard_bytes: int
) -> Iterator[tuple[str, Tensor]]:
    """Pass `tensors` through, and write them in files of about `shard_bytes`."""
    shards: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    size = total = 0
    for name, tensor in tensors:
        if pending and size + tensor.nbytes > shard_bytes:
            shards.append(_write_shard(pending, folder, len(shards)))
            pending, size = {}, 0
        pending[name] = tensor
        size, total = size + tensor.nbytes, total + tensor.nbytes
        yield name, tensor
    shards.append(_write_shard(pending, folder, len(shards)))
    _name_shards(shards, folder, total)


def _write_shard(tensors: dict[str, Tensor], folder: Path, index: int) -> list[str]:
    save_file(tensors, folder / f"shard-{index}", metadata={"format": "pt"})
    return list(tensors)


def _name_shards(shards: list[list[str]], folder: Path, total: int) -> None:
    """Give the shards the names transformers looks for, and an index when there are several."""
    if len(shards) == 1:
        (folder / "shard-0").rename(folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for index, names in enumerate(shards):
        final = f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"shard-{index}").rename(folder / final)
        weight_map |= dict.fromkeys(names, final)
    index_file = str(folder / "model.safetensors.index.json")
    files.publish_json(index_file, {"metadata": {"total_size": total}, "weight_map": weight_map})


def copy_side_files(source: Path, folder: Path, dtype: str) -> None:
    """The configuration with the type the weights now have, the tokenizer, and generation defaults."""
    config: dict[str, Any] = files.read_json(str(source / "config.json"))
    config.pop("torch_dtype", None)
    files.publish_json(str(folder / "config.json"), {**config, "dtype": dtype})
    for name in _COPIED:
        if (source / name).exists():
            shutil.copyfile(source / name, folder / name)


def publish_folder(temporary: Path, target: Path) -> None:
    """Rename a complete folder to its name. A folder that has the name is moved away first."""
    for file in temporary.rglob("*"):
        _sync(file)
    _sync(temporary)
    if target.exists():
        old = target.parent / f".{target.name}.{uuid.uuid4().hex}.old"
        os.replace(target, old)
        os.replace(temporary, target)
        shutil.rmtree(old)
    else:
        os.replace(temporary, target)
    _sync(target.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
