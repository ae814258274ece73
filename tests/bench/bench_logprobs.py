"""Memory of log-probabilities and of a training step at a vocabulary of 151,936: one micro-batch, one process a number.

`python tests/bench/bench_logprobs.py`: by how much a process grows with the logits of a chunk of rows at a time, and
with those of all rows at once, as without chunks. Three quarters of the tokens are responses, which alone have logits.
"""

import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

VOCABULARY = 151_936
MIB = 1024**2
CASES = [(dtype, tokens) for dtype in ("bfloat16", "float32") for tokens in (1024, 4096)]
PASSES = "log-probabilities", "training step"
WAYS = "chunks", "all at once"


def measure(dtype: str, tokens: int, which: str, way: str) -> None:
    """Print by how many bytes the memory of this process was larger during the pass than before it."""
    from made_trainer import start_rank, write_batch, write_model

    from milepost.engines.protocols import UpdateParams
    from milepost.storage.training import PerfSection

    update = UpdateParams("ppo_clip", {})
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder, "model"), vocab=VOCABULARY, hidden=64, layers=2)
        rank = start_rank(model, PerfSection(dtype=dtype, max_tokens_per_micro_batch=tokens))
        if way == "all at once":
            keep_all(rank)
        for name, length in (("warm", 8), ("measured", tokens // 2)):
            batch = write_batch(Path(folder, name), [length] * 2, VOCABULARY)
            before = memory("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
            if which == "training step":
                rank.step(batch, update, name)
            else:
                rank.logprobs(batch, "policy", f"{folder}/{name}")
        print(memory("VmHWM") - before)


def keep_all(rank: Any) -> None:
    """One chunk, whatever its size."""
    passes = rank._policy._passes
    passes.layer = replace(passes.layer, chunk_bytes=sys.maxsize)


def memory(name: str) -> int:
    """Bytes, as Linux counts them for this process."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return 1024 * int(line.split()[1])


def measured(*case: str) -> float:
    """MiB, from a process of its own."""
    command = [sys.executable, __file__, *case]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return int(done.stdout.split()[-1]) / MIB


def main() -> None:
    print(f"{'':17}  {'':8}  {'tokens':>6}  {'chunks MiB':>10}  {'all MiB':>8}  {'ratio':>5}")
    for which in PASSES:
        for dtype, tokens in CASES:
            chunks, whole = (measured(dtype, str(tokens), which, way) for way in WAYS)
            numbers = f"{chunks:>10.0f}  {whole:>8.0f}  {chunks / whole:>5.2f}"
            print(f"{which:17}  {dtype:8}  {tokens:>6}  {numbers}", flush=True)


if __name__ == "__main__":
    measure(sys.argv[1], int(sys.argv[2]), *sys.argv[3:]) if len(sys.argv) > 1 else main()
