"""Whether engines, the way weights travel between them and the GPUs of this machine go together: asked by a plan."""

from typing import Any

from milepost.engines.memory_plan import DriverSilent, check_memory, gpu_bytes, gpu_count
from milepost.engines.torch_build import require_cuda
from milepost.storage.parameters import Parameters
from milepost.storage.stages import WHOLE, Course

LIVE = ("tensor", "distributed")  # transports that send tensors, and write no folder


def check_engines(parameters: Parameters, course: Course = WHOLE) -> None:
    """ValueError for engines that have no weights to give or to take, or that are missing."""
    train, rollout = parameters.engines.train, parameters.engines.rollout
    transport = parameters.sync.transport
    if rollout == "none" and course.makes("generate"):
        raise ValueError(
            "engines.rollout is 'none' and nothing stored is taken: choose an engine, or name a run as data.rollouts"
        )
    if rollout == "none" and parameters.eval.every_steps:
        raise ValueError("an evaluation needs rollout engines and this run has none: set eval.every_steps to 0")
    check_spare(parameters)
    if "none" in (train, rollout):
        return
    if train == "fake" and rollout != "fake":
        raise ValueError(
            f"engines.train is 'fake' and makes no weights that engines.rollout {rollout!r} could load: set both to "
            "'fake', or neither"
        )
    if rollout == "fake" and transport in LIVE:
        raise ValueError(f"sync.transport is {transport!r} and a fake engine takes no tensors: set it to 'disk'")


def check_spare(parameters: Parameters) -> None:
    """ValueError for a spare engine that has nothing to do, or that nobody would start."""
    if not parameters.eval.spare_engine:
        return
    if not parameters.eval.every_steps:
        raise ValueError("eval.spare_engine is on and nothing is evaluated: set eval.every_steps, or turn it off")
    if parameters.engines.sglang_urls:
        raise ValueError(
            "eval.spare_engine is on and engines.sglang_urls names servers that run already, beside which none is "
            "started: turn it off, or leave engines.sglang_urls empty"
        )


def check_transport(parameters: Parameters) -> None:
    """ValueError for pushes that cannot reach the GPUs of engines that this run starts."""
    perf, engines, transport = parameters.perf, parameters.engines, parameters.sync.transport
    if engines.rollout != "sglang" or engines.sglang_urls or engines.train == "none":
        return
    if transport == "distributed" and perf.colocate:
        raise ValueError(
            "sync.transport is 'distributed' and NCCL takes one member on each GPU: turn perf.colocate off, or set it "
            "to 'tensor'"
        )
    if transport == "tensor" and not (perf.colocate and engines.rollout_engines == 1):
        raise ValueError(
            "sync.transport is 'tensor' and reaches only an engine on the trainer's first GPU: have one rollout engine "
            "and perf.colocate on, or set it to 'distributed' or 'delta'"
        )


def _gpu_bytes() -> int | None:
    """Of this machine, as Ray will see it: a driver that does not answer has no GPUs."""
    try:
        return gpu_bytes()
    except DriverSilent:
        return None


def has_gpus() -> bool:
    return _gpu_bytes() is not None


def usable_gpus() -> int:
    """GPUs of this machine, as Ray will see them."""
    try:
        return gpu_count()
    except DriverSilent:
        return 0


def check_gpus(config: dict[str, Any], parameters: Parameters) -> None:
    """ValueError where this machine has GPUs that the run cannot use; those of another machine are not known."""
    available = _gpu_bytes()
    if available is None:
        return
    check_transport(parameters)
    check_memory(config, parameters, available)
    if parameters.engines.train == "megatron":
        require_cuda()
