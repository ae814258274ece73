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
from typing import Any

import numpy as np
import torch

from milepost.engines import megatron_world
from milepost.engines.cpu_shim import CpuRngTracker
from milepost.engines.losses import get_loss
from milepost.engines.megatron_batch import MicroBatch, Sample, loss_columns, micro_batch
from milepost.engines.megatron_memory import Parked, kept_tensors, scratch_tensors
from milepost.engines.megatron_model import build_model, build_optimizer, compiles, device, set_rates, wrap_model
from milepost.engines.megatron_step import Passes, denominators
from milepost.engines.model_layout import parameter_count, read_shape
from milepost.storage.parameters import ModelSection, OptimizerSection, PerfSection

PEAK_FLOPS = 989e12
ATTENTION_WORDS = ("flash", "fmha", "sdpa", "attention")
NAMES = "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"
SIZES: dict[str, tuple[int, ...]] = {
    "0.6B": (1024, 3072, 28, 16, 8),
    "1.7B": (2048, 6144, 28, 16, 8),
    "4B": (2560, 9728, 36, 32, 8),
    "tiny": (64, 192, 2, 4, 2),
}


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


def hf_config(size: str) -> dict[str, Any]:
    """The config.json of Qwen3 in that size."""
    small = size == "tiny"
    return dict(zip(NAMES, SIZES[size], strict=True)) | {
        "architectures": ["Qwen3ForCausalLM"],
        "head_dim": 16 if small else 128,
        "vocab_size": 256 if small else 151936,
        "max_position_embeddings": 40960,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
    }


class Trainer:
    """What MegatronRank is made of, with random weights, and without tables."""

    def __init__(self, size: str, perf: PerfSection, *, deterministic: bool) -> None:
        self.config, self.perf = hf_config(size), perf
        shape, model = read_shape(self.config), ModelSection()
        megatron_world.keep_to_loopback(megatron_world.LOOPBACK)
        store = megatron_world.open_store(megatron_world.LOOPBACK, 1)
        megatron_world.join_world(store, rank=0, world=1, model=model)
        megatron_world.seed_streams(0)
        if not deterministic:
            torch.use_deterministic_algorithms(False)
        gpt = build_model(shape, model, perf)
        with torch.no_grad():
            for parameter in gpt.parameters():
                parameter.normal_(0.0, 0.02) if parameter.dim() > 1 else parameter.fill_(1.0)
        self.gpt, self.model = gpt, wrap_model(gpt)
        self.optimizer = build_optimizer(self.model, OptimizerSection(), perf)
        self.passes = Passes(self.model, shape, 1.0, compiled=compiles(perf))
        self.parked = Parked()

    def micro_batches(self, lengths: list[int], count: int) -> tuple[list[Sample], list[MicroBatch]]:
        """`count` micro-batches of sequences of `lengths`, three quarters of each a response."""
        random, samples, batches = np.random.default_rng(0), [], []
        for _ in range(count):
            made = [_sample(random, length, self.config["vocab_size"], len(samples)) for length in lengths]
            samples += made
            batches.append(micro_batch(made, loss_columns(made), device(), packing=self.perf.packing))
        return samples, batches

    def step(self, samples: list[Sample], batches: list[MicroBatch]) -> None:
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.passes.gradients(batches, get_loss("ppo_clip"), {}, denominators(samples))
        set_rates(self.optimizer, lr=1e-6, weight_decay=0.0)
        self.optimizer.step()


def _sample(random: np.random.Generator, length: int, vocab: int, row: int) -> Sample:
    """One that takes `length` positions: its last token predicts nothing."""
    tokens = random.integers(0, vocab, length + 1, dtype=np.int32)
    prompt = max(1, length // 4)
    ones = np.ones(length + 1 - prompt, np.float32)
    columns = {"loss_mask": ones, "advantages": ones, "old_logprobs": -12 * ones}
    return Sample(row, str(row), tokens[:prompt], tokens[prompt:], columns)


def cases(*, tiny: bool) -> dict[str, list[int]]:
    """Lengths of the sequences of a micro-batch by name."""
    scale = 32 if tiny else 1
    short = np.random.default_rng(1).integers(128 // scale, 896 // scale, 15).tolist()
    rest = 8192 // scale - sum(short)
    mixed = [*short, rest] if rest > 0 else [512 // scale] * 16
    return {"1 x 2,048": [2048 // scale], "1 x 8,192": [8192 // scale], "8,192 of about 512": mixed}


def flops(config: dict[str, Any], lengths: list[int]) -> float:
    """Of forward and backward passes over sequences of `lengths`."""
    width = config["num_attention_heads"] * config["head_dim"] * config["num_hidden_layers"]
    attention = sum(6 * length**2 * width for length in lengths)
    return 6.0 * parameter_count(config) * sum(lengths) + attention


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
