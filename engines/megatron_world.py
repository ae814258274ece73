"""How trainer ranks find each other, and the settings of one rank's process: backend, threads, seed."""

import contextlib
import os
import socket
from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

from milepost.engines import cluster
from milepost.engines.cpu_shim import CpuRngTracker, cuda_on_cpu
from milepost.engines.row_split import RowSplit
from milepost.engines.torch_build import require_cuda
from milepost.storage.parameters import ModelSection


def own_address() -> str:
    """The address other ranks reach this process at: loopback outside of Ray, too."""
    return cluster.own_address() if cluster.is_connected() else cluster.LOOPBACK


def require_given_gpu() -> None:
    """ValueError when Ray gave this process a GPU that its torch cannot use: it would train on the CPU unnoticed."""
    if cluster.given_gpus() and not torch.cuda.is_available():
        require_cuda()


def open_store(address: str, world: int) -> dist.TCPStore:
    """A rendezvous on a port that the system picks and that stays ours, listening on `address` alone."""
    listener = socket.create_server((address, 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(
        address, port, world, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def find_store(address: str, port: int, world: int) -> dist.TCPStore:
    """The rendezvous that rank 0 opened."""
    return dist.TCPStore(address, port, world, is_master=False)


def join_world(store: dist.Store, *, rank: int, world: int, model: ModelSection) -> None:
    """Join the other ranks and lay out Megatron's process groups."""
    if model.sequence_parallel:  # Megatron's gathering runs beside its products only when kernels start in their order
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    dist.init_process_group(
        "nccl" if torch.cuda.is_available() else "gloo",
        store=dist.PrefixStore("train", store),
        rank=rank,
        world_size=world,
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=model.tensor_parallel,
        pipeline_model_parallel_size=model.pipeline_parallel,
        context_parallel_size=model.context_parallel,
        create_gloo_process_groups=False,
    )


def row_split(model: ModelSection) -> RowSplit:
    """Which part of every row of tokens this rank has."""
    sequence = model.tensor_parallel if model.sequence_parallel else 1
    return RowSplit(parallel_state.get_context_parallel_rank(), model.context_parallel, sequence)


def keep_to_loopback(address: str) -> None:
    """Let gloo talk on the loopback interface when all ranks are on this machine."""
    if address == cluster.LOOPBACK:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def leave_world() -> None:
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def seed_streams(seed: int) -> None:
    """Seed torch and Megatron's named random streams."""
    torch.manual_seed(seed)
    if torch.cuda.is_available():
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # a pass over memory that is written next anyway
        model_parallel_cuda_manual_seed(seed)
        return
    tracker = get_cuda_rng_tracker()
    tracker.reset()
    tracker.add("model-parallel-rng", seed + 2718 + parallel_state.get_tensor_model_parallel_rank())


def thread_count(threads: int, world: int) -> int:
    """`threads`, or this rank's share of the processors when that is 0."""
    return threads or max(1, len(os.sched_getaffinity(0)) // world)


@contextlib.contextmanager
def on_device(threads: int, tracker: CpuRngTracker) -> Iterator[None]:
    """Where Megatron's code runs. Entered for each call, because the thread count and the shim belong to a thread."""
    torch.set_num_threads(threads)
    with contextlib.nullcontext() if torch.cuda.is_available() else cuda_on_cpu(tracker):
        yield
