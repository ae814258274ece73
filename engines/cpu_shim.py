"""Megatron-core on a machine without a GPU: the one place where its requests for `cuda` are answered by the CPU.

Nothing is changed outside `cuda_on_cpu`, and inside it only what Megatron-core calls. With a GPU this is not used.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")
_ANSWERS = {"current_device": CPU, "current_stream": None, "set_device": None, "synchronize": None}  # of torch.cuda
# Of Megatron's recomputation, which keeps the state of the CUDA generator beside the CPU's and the tracker's.
_RECOMPUTE_ANSWERS = {"_get_cuda_rng_state": None, "_set_cuda_rng_state": None}


def _is_cuda(device: Any) -> bool:
    return str(device).startswith("cuda") or (isinstance(device, int) and not isinstance(device, bool))


def _cuda_name(tensor: torch.Tensor) -> str:
    """`torch.cuda.FloatTensor` for a float32 tensor: what `Tensor.type()` says of a tensor on a GPU."""
    return "torch.cuda." + torch._C._TensorBase.type(tensor).removeprefix("torch.")


class CudaOnCpu(TorchFunctionMode):
    """Answers `device="cuda"`, `.cuda()`, `.to("cuda")` and `.type()` with CPU tensors. Holds for one thread."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return _cuda_name(args[0])
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], CPU, *args[2:])
        if kwargs.get("device") is not None and _is_cuda(kwargs["device"]):
            kwargs = {**kwargs, "device": CPU}
        return func(*args, **kwargs)


class CpuRngTracker:
    """Megatron's tracker of named random streams, over the CPU generator instead of a CUDA one."""

    def __init__(self) -> None:
        self._states: dict[str, torch.Tensor] = {}

    def is_initialized(self) -> bool:
        return bool(self._states)

    def reset(self) -> None:
        self._states = {}

    def get_states(self) -> dict[str, torch.Tensor]:
        return dict(self._states)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        self._states = dict(states)

    def add(self, name: str, seed: int) -> None:
        if name in self._states:
            raise ValueError(f"random stream {name!r} is added twice")
        self._states[name] = torch.Generator().manual_seed(seed).get_state()

    @contextlib.contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """Draw from the stream `name`, and leave the default one as it was."""
        if name not in self._states:
            raise LookupError(f"random stream {name!r} was not added, known are {sorted(self._states)}")
        outside = torch.get_rng_state()
        torch.set_rng_state(self._states[name])
        try:
            yield
        finally:
            self._states[name] = torch.get_rng_state()
            torch.set_rng_state(outside)


@contextlib.contextmanager
def cuda_on_cpu(tracker: CpuRngTracker) -> Iterator[None]:
    """Run Megatron-core's code on the CPU inside this block, in this thread, with `tracker` as its random streams."""
    from megatron.core.tensor_parallel import random

    with contextlib.ExitStack() as stack:
        for name, answer in _ANSWERS.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, mock.Mock(return_value=answer)))
        stack.enter_context(mock.patch.object(random, "_CUDA_RNG_STATE_TRACKER", tracker))
        stack.enter_context(mock.patch.object(random, "_CUDA_RNG_STATE_TRACKER_INITIALIZED", True))
        for name, answer in _RECOMPUTE_ANSWERS.items():
            stack.enter_context(mock.patch.object(random, name, mock.Mock(return_value=answer)))
        stack.enter_context(CudaOnCpu())
        yield
