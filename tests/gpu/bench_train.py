"""How fast the Megatron trainer is on this machine's first GPU: `python tests/gpu/bench_train.py [--tiny]`.

Models have random weights. MFU counts 6 x parameters a token, and causal attention inside each sequence, over the
989 TFLOP/s of an H100 or H200 in bfloat16. Prints a table, and writes bench_train.json into --out, $OUT or here.
"""

import argparse
import gc
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from made_trainer import SIZES, Trainer, flops

from milepost.engines import megatron_world
from milepost.engines.cpu_shim import CpuRngTracker
from milepost.engines.megatron_memory import kept_tensors, scratch_tensors
from milepost.storage.parameters import PerfSection

PEAK_FLOPS = 989e12
ATTENTION_WORDS = ("flash", "fmha", "sdpa", "attention")


@dataclass(frozen=True)
class Row:
    """One measurement. Tokens a second are of whole optimizer steps, and of passes for log-probabilities alone."""

    model: str
    case: str
    micro_batches: int
    tokens_per_second: float
    mfu: float
    logprob_tokens_per_second: float
    logprob_over_step: float
    attention_share: float
    attention_kernels: list[str]
    peak_gib: float
    release_seconds: float
    resume_seconds: float
    released_gib: float


def cases(*, tiny: bool) -> dict[str, list[int]]:
    """Lengths of the sequences of a micro-batch by name."""
    scale = 32 if tiny else 1
    short = np.random.default_rng(1).integers(128 // scale, 896 // scale, 15).tolist()
    rest = 8192 // scale - sum(short)
    mixed = [*short, rest] if rest > 0 else [512 // scale] * 16
    return {"1 x 2,048": [2048 // scale], "1 x 8,192": [8192 // scale], "8,192 of about 512": mixed}


def seconds(work: Callable[[], object], *, repeats: int) -> float:
    """The shortest of some runs, with everything that was asked of the GPU done."""
    taken = []
    for _ in range(repeats):
        _wait()
        started = time.perf_counter()
        work()
        _wait()
        taken.append(time.perf_counter() - started)
    return min(taken)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def attention_kernels(work: Callable[[], object]) -> tuple[float, list[str]]:
    """The share of the GPU's (else the CPU's) time in attention kernels, and their names."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        work()
        _wait()
    on_gpu = torch.cuda.is_available()
    times = {
        event.key: event.self_device_time_total if on_gpu else event.self_cpu_time_total
        for event in profile.key_averages()
    }
    found = {name: spent for name, spent in times.items() if any(word in name.lower() for word in ATTENTION_WORDS)}
    names = sorted(found, key=lambda name: -found[name])
    return sum(found.values()) / max(1, sum(times.values())), [name[:120] for name in names[:6]]


def measure(trainer: Trainer, size: str, case: str, lengths: list[int], *, tokens: int, repeats: int) -> Row:
    count = max(1, tokens // sum(lengths))
    samples, batches = trainer.micro_batches(lengths, count)
    total = count * sum(lengths)
    for _ in range(2):  # compiles
        trainer.step(samples[: len(lengths)], batches[:1])
        trainer.passes.logprobs(batches[:1])
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    step = seconds(lambda: trainer.step(samples, batches), repeats=repeats)
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    logprobs = seconds(lambda: trainer.passes.logprobs(batches), repeats=repeats)
    share, kernels = attention_kernels(lambda: trainer.step(samples[: len(lengths)], batches[:1]))
    kept = list(kept_tensors(trainer.gpt, trainer.optimizer))
    held = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept}
    trainer.optimizer.zero_grad()
    trainer.parked.release(kept, scratch_tensors(trainer.optimizer))  # the first time pins the host's memory
    trainer.parked.resume()
    release = seconds(lambda: trainer.parked.release(kept, scratch_tensors(trainer.optimizer)), repeats=1)
    resume = seconds(trainer.parked.resume, repeats=1)
    return Row(
        model=size,
        case=case,
        micro_batches=count,
        tokens_per_second=total / step,
        mfu=count * flops(trainer.config, lengths) / step / PEAK_FLOPS,
        logprob_tokens_per_second=total / logprobs,
        logprob_over_step=step / logprobs,
        attention_share=share,
        attention_kernels=kernels,
        peak_gib=peak / 2**30,
        release_seconds=release,
        resume_seconds=resume,
        released_gib=sum(held.values()) / 2**30,
    )


def table(rows: list[Row]) -> str:
    head = ["model", "micro-batch", "tokens/s", "MFU", "log-prob tokens/s", "ratio", "attention", "kernel", "peak GiB"]
    head += ["release s", "resume s", "GiB moved"]
    lines = [head, ["---"] * len(head)]
    for row in rows:
        speed = [f"{row.tokens_per_second:,.0f}", f"{row.mfu:.3f}", f"{row.logprob_tokens_per_second:,.0f}"]
        speed += [
            f"{row.logprob_over_step:.2f}",
            f"{row.attention_share:.0%}",
            (row.attention_kernels or ["none"])[0][:40],
        ]
        memory = [
            f"{row.peak_gib:.1f}",
            f"{row.release_seconds:.2f}",
            f"{row.resume_seconds:.2f}",
            f"{row.released_gib:.1f}",
        ]
        lines.append([row.model, row.case, *speed, *memory])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def measure_size(size: str, perf: PerfSection, arguments: argparse.Namespace) -> list[Row]:
    with megatron_world.on_device(arguments.threads, CpuRngTracker()):
        trainer = Trainer(size, perf, deterministic=not arguments.nondeterministic)
        try:
            tokens = 512 if arguments.tiny else arguments.tokens
            return [
                measure(trainer, size, case, lengths, tokens=tokens, repeats=arguments.repeats)
                for case, lengths in cases(tiny=arguments.tiny).items()
            ]
        finally:
            megatron_world.leave_world()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, for a CPU")
    parser.add_argument("--sizes", default="0.6B,1.7B,4B", help="which of " + ", ".join(SIZES))
    parser.add_argument("--tokens", type=int, default=65536, help="of an optimizer step")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--recompute", default="none", choices=["none", "selective", "full"])
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--no-packing", action="store_true")
    parser.add_argument("--nondeterministic", action="store_true", help="let kernels add in any order")
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    arguments = parser.parse_args()
    perf = PerfSection(
        dtype="bfloat16",
        recompute=arguments.recompute,
        compile=not arguments.no_compile,
        packing=not arguments.no_packing,
    )
    rows: list[Row] = []
    for size in ["tiny"] if arguments.tiny else arguments.sizes.split(","):
        rows += measure_size(size, perf, arguments)
        print(table(rows), flush=True)
        gc.collect()
        if torch.cuda.is_available():
            torch._dynamo.reset()
            torch.cuda.empty_cache()
    device_name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    result = {"device": device_name, "torch": torch.__version__, "arguments": vars(arguments)}
    result["rows"] = [asdict(row) for row in rows]
    Path(arguments.out, "bench_train.json").write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
