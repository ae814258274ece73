"""What SGLang answers for the weights it holds: the checksums of its own, fused tensors, worked out from what was sent.

SGLang drops a tensor that it does not know in silence, so that only its own answer says what it loaded.
"""

import hashlib
import importlib.util
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from milepost.engines.weight_buckets import Named, as_bytes

SAMPLED = 16
VOCABULARY_PADDING = 64
_FUSED = {
    "q_proj": ("qkv_proj", 0, 3),
    "k_proj": ("qkv_proj", 1, 3),
    "v_proj": ("qkv_proj", 2, 3),
    "gate_proj": ("gate_up_proj", 0, 2),
    "up_proj": ("gate_up_proj", 1, 2),
}
_ROWS = ("o_proj.weight", "down_proj.weight")
_WEIGHTS = (".weight", ".bias")
_TIED = "lm_head.weight"
_VOCABULARY = ("embed_tokens.weight", "lm_head.weight")
GPU_HASH = "kernels/ops/memory/gpu_tensor_hash.py"


def engine_name(name: str) -> tuple[str, int, int]:
    """SGLang's name for a Hugging Face tensor, and which of how many tensors it is in there."""
    *path, module, kind = name.split(".")
    fused, index, count = _FUSED.get(module, (module, 0, 1))
    return ".".join([*path, fused, kind]), index, count


class SentTensors:
    """The checksums that engines are to answer with, for all of what was sent or for a sample, by name.

    `splits` are the tensor-parallel sizes of the engines. A thread works them out while engines load, as each checksum
    of a GPU's tensor waits for the GPU; whoever makes this closes it.
    """

    def __init__(
        self, names: Collection[str], which: Literal["sampled", "full"], *, seed: str, splits: Collection[int]
    ) -> None:
        self._names = {engine_name(name)[0] for name in names}
        every = sorted(self._names)
        sample = random.Random(seed).sample(every, min(SAMPLED, len(every)))
        self._checked = set(every if which == "full" else sample) if splits else set()
        self._places = [(rank, ranks) for ranks in splits for rank in range(ranks)]
        self._parts: dict[str, dict[int, Tensor]] = {}  # of fused tensors that are not complete yet
        self._checksums: dict[tuple[str, int, int], str] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checksums")
        self._pending: list[Future[None]] = []

    def remember(self, bucket: Sequence[Named]) -> None:
        """Work on `bucket` once those before it are done, so that the tensors of few are kept."""
        self._wait()
        self._pending.clear()
        for name, tensor in bucket:
            fused, index, count = engine_name(name)
            if fused not in self._checked:
                continue
            parts = self._parts.setdefault(fused, {})
            parts[index] = tensor
            if len(parts) == count:
                ordered = [parts[index] for index in range(count)]
                self._pending.append(self._pool.submit(self._complete, fused, ordered))
                del self._parts[fused]

    def _complete(self, name: str, parts: Sequence[Tensor]) -> None:
        for rank, ranks in self._places:
            held = torch.cat([_slice(name, part, rank, ranks) for part in parts])
            self._checksums[name, rank, ranks] = checksum(held)

    def _wait(self) -> None:
        for complete in self._pending:
            complete.result()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def differences(self, found: Mapping[str, str], *, rank: int, ranks: int) -> str:
        """What is wrong with the checksums of tensor-parallel rank `rank`; empty when nothing is."""
        self._wait()
        missing = sorted(self._names - found.keys())
        unsent = sorted(name for name in found.keys() - self._names if name.endswith(_WEIGHTS) and name != _TIED)
        if missing or unsent:
            return f"it has no tensor for {missing[:3]}, and was sent nothing for {unsent[:3]}"
        wrong = sorted(n for n in self._checked if self._checksums.get((n, rank, ranks)) != found[n])
        return f"tensors {wrong[:3]} are not what was sent" if wrong else ""


def _slice(name: str, tensor: Tensor, rank: int, ranks: int) -> Tensor:
    """What tensor-parallel rank `rank` holds of a tensor that is, or is part of, SGLang's tensor `name`."""
    if name.endswith(_VOCABULARY):
        padding = -tensor.shape[0] % VOCABULARY_PADDING
        tensor = torch.cat([tensor, tensor.new_zeros(padding, *tensor.shape[1:])]) if padding else tensor
    elif name.endswith(_ROWS):
        return tensor.chunk(ranks, dim=1)[rank].contiguous()
    elif "_proj." not in name:
        return tensor
    return tensor.chunk(ranks)[rank]


def checksum(tensor: Tensor) -> str:
    """As SGLang's weights checker works it out where the tensor is."""
    if tensor.is_cuda:
        with torch.cuda.device(tensor.device):  # of this thread, which is where the kernel is launched
            return f"{_gpu_hash()(tensor):016x}"
    return hashlib.sha256(as_bytes(tensor).numpy().data).digest()[:8].hex()


@cache
def _gpu_hash() -> Callable[[Tensor], int]:
    """SGLang's own, out of its file, which needs nothing else of SGLang: importing its packages takes many seconds."""
    package = importlib.util.find_spec("sglang")
    folders = package.submodule_search_locations if package else None
    file = next((path for folder in folders or [] if (path := Path(folder, GPU_HASH)).is_file()), None)
    if file is None:
        raise LookupError(f"sglang has no {GPU_HASH} to check weights with: install the extra milepost[sglang]")
    spec = importlib.util.spec_from_file_location("sglang.kernels.ops.memory.gpu_tensor_hash", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Callable[[Tensor], int] = module.gpu_tensor_hash
    return found


def checked_ranks(answer: Mapping[str, object]) -> Sequence[tuple[Mapping[str, str], int, int]]:
    """The checksums in an answer of /weights_checker, with the tensor-parallel rank and how many there are."""
    ranks: list[tuple[Mapping[str, str], int, int]] = []
    for one in answer.get("ranks") or []:  # type: ignore[attr-defined]
        place = one["parallelism_info"]
        place = place[0] if isinstance(place, list) else place  # 0.5.21 lists one for each model, 0.5.17 has one
        ranks.append((one["checksums"], place["tp_rank"], place["tp_size"]))
    return ranks
