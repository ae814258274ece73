"""The content digest of weights: equal for equal tensors, however they are sharded into files or ordered."""

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import torch
from torch import Tensor

from milepost.engines.weight_buckets import as_bytes

THREADS = min(16, os.cpu_count() or 1)
WAITING = 2  # tensors ready for the next thread that is free
CHUNK_BYTES = 16 * 1024 * 1024


def tensor_digest(tensor: Tensor, *, ready: "torch.cuda.Event | None" = None) -> str:
    """BLAKE2b of dtype, shape and bytes: 32 hexadecimal digits. What fills a device's tensor comes before `ready`."""
    found = hashlib.blake2b(f"{tensor.dtype}{tuple(tensor.shape)}".encode(), digest_size=16)
    for chunk in _on_host(tensor, ready) if tensor.is_cuda else [as_bytes(tensor.to("cpu"))]:
        found.update(chunk.numpy().data)
    return found.hexdigest()


def _on_host(tensor: Tensor, ready: "torch.cuda.Event | None") -> Iterator[Tensor]:
    """The bytes of a GPU's tensor, a chunk at a time, which holds until the next is asked for.

    Pinned memory is what a GPU copies to at full speed, and torch keeps it for the next tensor. A stream for each
    tensor lets the copies of several threads run side by side.
    """
    stream = torch.cuda.Stream(tensor.device)
    stream.wait_event(ready or torch.cuda.current_stream(tensor.device).record_event())
    with torch.cuda.stream(stream):
        flat = as_bytes(tensor)
        held = torch.empty(min(CHUNK_BYTES, flat.numel()), dtype=torch.uint8, device="cpu", pin_memory=True)
        for part in flat.split(CHUNK_BYTES):
            chunk = held[: part.numel()].copy_(part, non_blocking=True)
            stream.synchronize()
            yield chunk


def weights_digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """One digest of named tensors: 32 hexadecimal digits. A name that is tied to another is left out by the caller."""
    return combined_digest(tensor_digests(tensors))


def combined_digest(digests: Mapping[str, str]) -> str:
    """`weights_digest` of tensors whose digests are known, by name."""
    lines = sorted(f"{name} {digest}" for name, digest in digests.items())
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()


def tensor_digests(tensors: Iterable[tuple[str, Tensor]], *, threads: int = THREADS) -> dict[str, str]:
    """Digest by name, worked out on `threads` threads, as hashing leaves the interpreter free.

    Tensors are read as threads become free, so that few are alive; a large one holds up its own thread only.
    """
    found: dict[str, str] = {}
    pending: dict[Future[str], str] = {}
    with ThreadPoolExecutor(threads) as pool:
        for name, tensor in tensors:
            ready = torch.cuda.current_stream(tensor.device).record_event() if tensor.is_cuda else None
            pending[pool.submit(tensor_digest, tensor, ready=ready)] = name
            while len(pending) >= threads + WAITING:
                done, _ = wait(pending, return_when=FIRST_COMPLETED)
                found |= {pending.pop(digest): digest.result() for digest in done}
        return found | {name: digest.result() for digest, name in pending.items()}
