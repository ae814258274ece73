"""How fast the Megatron trainer is on this machine's first GPU: `python tests/gpu/bench_train.py [--tiny]`.

Models have random weights. MFU counts 6 x parameters a token, and causal attention inside each sequence, over the
989 TFLOP/s of an H100 or H200 in bfloat16. Prints a table, and writes bench_train.json into --out, $OUT or here after
every measurement. "busy" is the time in kernels over the time of a micro-batch with its optimizer step: below 1, the
CPU is too slow to keep the GPU at work. --profile adds bench_train_profile.txt: kernels and operators of that time.
"""

import argparse
import gc
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from kernel_times import kernel_times, operator_table, wait
from made_trainer import SIZES, VARIANTS, Trainer
from torch._dynamo.utils import counters

from milepost.engines import megatron_world
from milepost.engines.cpu_shim import CpuRngTracker
from milepost.engines.flops import PEAKS, training_flops
from milepost.engines.megatron_memory import kept_tensors, scratch_tensors
from milepost.storage.training import PerfSection

PEAK_FLOPS = PEAKS["H200"]
CASES = ["1 x 2,048", "1 x 8,192", "8,192 of about 512", "16,384 of about 512"]
PROFILED = CASES[2]
Move = dict[str, float | str]


@dataclass(frozen=True)
class Row:
    """One measurement. Tokens a second are of whole optimizer steps, and of passes for log-probabilities alone."""

    model: str
    variant: str
    case: str
    micro_batches: int
    tokens_per_second: float
    mfu: float
    logprob_tokens_per_second: float
    logprob_over_step: float
    busy: float
    optimizer_seconds: float
    warmup_seconds: float
    graphs: int
    graph_breaks: int
    attention_share: float
    attention_kernels: list[str]
    peak_gib: float


def lengths_of(case: str, *, tiny: bool) -> list[int]:
    """Lengths of the sequences of a micro-batch."""
    scale = 32 if tiny else 1
    if case.startswith("1 x"):
        return [int(case.removeprefix("1 x ").replace(",", "")) // scale]
    short = np.random.default_rng(1).integers(128 // scale, 896 // scale, 15).tolist()
    rest = 8192 // scale - sum(short)
    pack = [*short, rest] if rest > 0 else [512 // scale] * 16
    return pack * 2 if case.startswith("16,384") else pack


def seconds(work: Callable[[], object], *, repeats: int) -> float:
    """The shortest of some runs, with everything that was asked of the GPU done."""
    taken = []
    for _ in range(repeats):
        wait()
        started = time.perf_counter()
        work()
        wait()
        taken.append(time.perf_counter() - started)
    return min(taken)


def measure(trainer: Trainer, case: str, arguments: argparse.Namespace) -> Row:
    lengths = lengths_of(case, tiny=arguments.tiny)
    count = max(1, (512 if arguments.tiny else arguments.tokens) // sum(lengths))
    samples, batches = trainer.micro_batches(lengths, count)

    def one() -> None:
        trainer.step(samples[: len(lengths)], batches[:1])

    def warm_up() -> None:
        for _ in range(2):
            one()
            trainer.passes.logprobs(batches[:1])

    counters.clear()
    warmup = seconds(warm_up, repeats=1)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    step = seconds(lambda: trainer.step(samples, batches), repeats=arguments.repeats)
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    logprobs = seconds(lambda: trainer.passes.logprobs(batches), repeats=arguments.repeats)
    kernels, alone = kernel_times(one), seconds(one, repeats=arguments.repeats)
    if arguments.profile and case == PROFILED:
        title = f"== {trainer.size}, {trainer.variant}, a micro-batch of {case} and an optimizer step: {alone:.4f} s"
        with open(Path(arguments.out, "bench_train_profile.txt"), "a") as file:
            file.write("\n".join([title, kernels.table, operator_table(one), ""]))
    return Row(
        model=trainer.size,
        variant=trainer.variant,
        case=case,
        micro_batches=count,
        tokens_per_second=count * sum(lengths) / step,
        mfu=count * training_flops(trainer.shape, lengths) / step / PEAK_FLOPS,
        logprob_tokens_per_second=count * sum(lengths) / logprobs,
        logprob_over_step=step / logprobs,
        busy=kernels.seconds / alone,
        optimizer_seconds=seconds(trainer.optimizer.step, repeats=arguments.repeats),
        warmup_seconds=warmup,
        graphs=counters["stats"]["unique_graphs"],
        graph_breaks=sum(counters["graph_break"].values()),
        attention_share=kernels.attention_share,
        attention_kernels=kernels.attention_kernels,
        peak_gib=peak / 2**30,
    )


def moved(trainer: Trainer) -> Move:
    """Seconds to give up the state that a trainer keeps and to take it back, once the host's memory is pinned."""
    kept = list(kept_tensors(trainer.gpt, trainer.optimizer))
    held = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept}
    trainer.optimizer.zero_grad()

    def release() -> None:
        trainer.parked.release(kept, scratch_tensors(trainer.optimizer))

    release()
    trainer.parked.resume()
    given, taken = seconds(release, repeats=1), seconds(trainer.parked.resume, repeats=1)
    return {
        "model": trainer.size,
        "gib": sum(held.values()) / 2**30,
        "release_seconds": given,
        "resume_seconds": taken,
    }


def table(rows: list[Row]) -> str:
    head = ["model", "compiled", "micro-batch", "tokens/s", "MFU", "log-prob tokens/s", "ratio", "busy", "optimizer s"]
    head += ["warm-up s", "graphs", "breaks", "attention", "kernel", "peak GiB"]
    lines = [head, ["---"] * len(head)]
    for row in rows:
        speed = [f"{row.tokens_per_second:,.0f}", f"{row.mfu:.3f}", f"{row.logprob_tokens_per_second:,.0f}"]
        speed += [f"{row.logprob_over_step:.2f}", f"{row.busy:.2f}", f"{row.optimizer_seconds:.3f}"]
        speed += [f"{row.warmup_seconds:.0f}", str(row.graphs), str(row.graph_breaks), f"{row.attention_share:.0%}"]
        kernel = (row.attention_kernels or ["none"])[0][:30]
        lines.append([row.model, row.variant, row.case, *speed, kernel, f"{row.peak_gib:.1f}"])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def measured(size: str, variant: str, perf: PerfSection, arguments: argparse.Namespace) -> Iterator[Row | Move]:
    """A row for each case that fits in memory and was begun before the time was up; once, what moving state takes."""
    with megatron_world.on_device(arguments.threads, CpuRngTracker()), VARIANTS[variant].settings():
        trainer = Trainer(size, perf, variant)
        try:
            if (size, variant) == (arguments.sizes.split(",")[0], arguments.variants.split(",")[0]):
                yield moved(trainer)
            for case in arguments.cases.split(";"):
                if time.monotonic() > arguments.deadline:
                    print(f"left out, the time is up: {size}, {variant}, {case}", flush=True)
                    continue
                try:
                    yield measure(trainer, case, arguments)
                except torch.cuda.OutOfMemoryError as error:
                    print(f"left out, not enough memory: {size}, {variant}, {case}: {error}"[:200], flush=True)
                    trainer.optimizer.zero_grad()
        finally:
            megatron_world.leave_world()


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, for a CPU")
    parser.add_argument("--sizes", default="0.6B,1.7B,4B", help="which of " + ", ".join(SIZES))
    parser.add_argument("--variants", default="layers", help="which of " + ", ".join(VARIANTS))
    parser.add_argument("--cases", default=";".join(CASES), help="micro-batches, between semicolons")
    parser.add_argument("--tokens", type=int, default=65536, help="of an optimizer step")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--recompute", default="none", choices=["none", "selective", "full"])
    parser.add_argument("--no-packing", action="store_true")
    parser.add_argument("--profile", action="store_true", help=f"write the kernels of {PROFILED}")
    parser.add_argument("--limit-seconds", type=float, default=540.0, help="begin no measurement after so long")
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    arguments = parser.parse_args()
    for name, known in (("sizes", SIZES), ("variants", VARIANTS)):
        if unknown := set(getattr(arguments, name).split(",")) - set(known):
            parser.error(f"--{name} has {sorted(unknown)}, known are {sorted(known)}")
    arguments.sizes = "tiny" if arguments.tiny else arguments.sizes
    arguments.deadline = time.monotonic() + arguments.limit_seconds
    return arguments


def main() -> None:
    arguments = options()
    folder = Path(arguments.out)
    folder.mkdir(parents=True, exist_ok=True)
    perf = PerfSection(dtype="bfloat16", recompute=arguments.recompute, packing=not arguments.no_packing)
    device_name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    result = {"device": device_name, "torch": torch.__version__, "arguments": vars(arguments)}
    rows: list[Row] = []
    moves: list[Move] = []
    for size in arguments.sizes.split(","):
        for variant in arguments.variants.split(","):
            for found in measured(size, variant, perf, arguments):
                if isinstance(found, Row):
                    rows.append(found)
                else:
                    moves.append(found)
                result |= {"rows": [asdict(row) for row in rows], "moves": moves}
                (folder / "bench_train.json").write_text(json.dumps(result, indent=1))
            print(table(rows), flush=True)
            torch._dynamo.reset()
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    print("\n".join(json.dumps(move) for move in moves))


if __name__ == "__main__":
    main()
