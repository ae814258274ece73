"""The content digest of weights: equal for equal tensors, however they are sharded into files or ordered."""

import hashlib
import os
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch

THREADS = min(8, os.cpu_count() or 1)


def tensor_digest(tensor: torch.Tensor) -> str:
    """BLAKE2b of dtype, shape and bytes: 32 hexadecimal digits."""
    flat = tensor.detach().to("cpu").contiguous()
    found = hashlib.blake2b(f"{flat.dtype}{tuple(flat.shape)}".encode(), digest_size=16)
    found.update(flat.view(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def weights_digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """One digest of named tensors: 32 hexadecimal digits. A name that is tied to another is left out by the caller."""
    return combined_digest(tensor_digests(tensors))


def combined_digest(digests: Mapping[str, str]) -> str:
    """`weights_digest` of tensors whose digests are known, by name."""
    lines = sorted(f"{name} {digest}" for name, digest in digests.items())
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()


def tensor_digests(tensors: Iterable[tuple[str, torch.Tensor]], *, threads: int = THREADS) -> dict[str, str]:
    """Digest by name, worked out on `threads` threads, as hashing leaves the interpreter free; few tensors wait."""
    found: dict[str, str] = {}
    waiting: deque[tuple[str, Future[str]]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for name, tensor in tensors:
            waiting.append((name, pool.submit(tensor_digest, tensor)))
            if len(waiting) > 2 * threads:
                name, digest = waiting.popleft()
                found[name] = digest.result()
        return found | {name: digest.result() for name, digest in waiting}
