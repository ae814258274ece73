"""Named tensors gathered into buckets: one flat buffer of bytes and a description of what lies where in it."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

Named = tuple[str, Tensor]
Layout = list[dict[str, Any]]


def buckets(tensors: Iterable[Named], limit: int) -> Iterator[list[Named]]:
    """Consecutive tensors of at most `limit` bytes together; a larger tensor goes alone."""
    pending: list[Named] = []
    size = 0
    for name, tensor in tensors:
        if pending and size + tensor.nbytes > limit:
            yield pending
            pending, size = [], 0
        pending.append((name, tensor))
        size += tensor.nbytes
    if pending:
        yield pending


def layout(bucket: Sequence[Named]) -> Layout:
    """Name, dtype and shape of each tensor, in the order of their bytes."""
    return [{"name": name, "dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape)} for name, tensor in bucket]


def flatten(bucket: Sequence[Named]) -> Tensor:
    """The bytes of all tensors behind each other, on their device."""
    return torch.cat([as_bytes(tensor) for _, tensor in bucket])


def unflatten(flat: Tensor, described: Layout) -> dict[str, Tensor]:
    """Copies of the tensors in `flat`; ValueError when it is not as long as `described` says."""
    found: dict[str, Tensor] = {}
    begin = 0
    for row in described:
        dtype = named_dtype(row["dtype"])
        size = torch.Size(row["shape"]).numel() * dtype.itemsize
        found[row["name"]] = flat[begin : begin + size].clone().view(dtype).reshape(row["shape"])
        begin += size
    if begin != flat.numel() or len(found) != len(described):
        raise ValueError(f"a bucket of {flat.numel()} bytes was described as {begin} bytes: send it again")
    return found


def byte_count(described: Layout) -> int:
    return sum(torch.Size(row["shape"]).numel() * named_dtype(row["dtype"]).itemsize for row in described)


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def named_dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is not a type of tensors, expected float32, bfloat16, ...")
    return found
