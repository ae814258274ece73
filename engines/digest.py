"""The content digest of weights: equal for equal tensors, however they are sharded into files or ordered."""

import hashlib
from collections.abc import Iterable

import torch


def tensor_digest(tensor: torch.Tensor) -> str:
    """BLAKE2b of dtype, shape and bytes: 32 hexadecimal digits."""
    flat = tensor.detach().to("cpu").contiguous()
    found = hashlib.blake2b(f"{flat.dtype}{tuple(flat.shape)}".encode(), digest_size=16)
    found.update(flat.view(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def weights_digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """One digest of named tensors: 32 hexadecimal digits. A name that is tied to another is left out by the caller."""
    lines = sorted(f"{name} {tensor_digest(tensor)}" for name, tensor in tensors)
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()
