"""Which kernels a piece of GPU work runs, and how long each takes; on a CPU, which operators."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity

ATTENTION_WORDS = ("flash", "fmha", "sdpa", "attention")


@dataclass(frozen=True)
class KernelTimes:
    """Seconds in all kernels, the share of attention, attention kernels by time, and a table of the longest."""

    seconds: float
    attention_share: float
    attention_kernels: list[str]
    table: str


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def kernel_times(work: Callable[[], object], *, rows: int = 25) -> KernelTimes:
    on_gpu = torch.cuda.is_available()
    # Without the CPU's activities, which would slow the work that is measured.
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profile:
        work()
        wait()
    events = profile.key_averages()
    times = {event.key: event.self_device_time_total if on_gpu else event.self_cpu_time_total for event in events}
    attention = {name: spent for name, spent in times.items() if any(word in name.lower() for word in ATTENTION_WORDS)}
    longest = sorted(attention, key=lambda name: -attention[name])
    order = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    return KernelTimes(
        seconds=sum(times.values()) / 1e6,
        attention_share=sum(attention.values()) / max(1, sum(times.values())),
        attention_kernels=[name[:120] for name in longest[:6]],
        table=events.table(sort_by=order, row_limit=rows, max_name_column_width=90),
    )


def operator_table(work: Callable[[], object], *, rows: int = 25) -> str:
    """The operators and launches that take the CPU longest: what to look at when kernels do not fill the GPU."""
    with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as profile:
        work()
        wait()
    table: str = profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=rows, max_name_column_width=90)
    return table
