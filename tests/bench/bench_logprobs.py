"""Memory of a pass that takes log-probabilities, at a vocabulary of 151,936: one micro-batch, one process a line.

`python tests/bench/bench_logprobs.py`; beside the logits that the model itself returns, which are of its own type, only
chunks of them may be there in float32. Other software makes a float32 copy of all.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

VOCABULARY = 151_936
MIB = 1024**2
CASES = [("bfloat16", 1024), ("bfloat16", 4096), ("float32", 1024), ("float32", 4096)]


def measure(dtype: str, tokens: int) -> None:
    """Print by how many bytes the memory of this process was larger during the pass than before it."""
    from made_trainer import start_rank, write_batch, write_model

    from milepost.storage.training import PerfSection

    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder, "model"), vocab=VOCABULARY, hidden=64, layers=2)
        perf = PerfSection(dtype=dtype, max_tokens_per_micro_batch=tokens)
        rank = start_rank(model, perf)
        few, many = (write_batch(Path(folder), [length] * 2, VOCABULARY) for length in (8, tokens // 2))
        rank.logprobs(few, "policy", f"{folder}/warm")
        before = memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
        rank.logprobs(many, "policy", f"{folder}/filled")
        print(memory("VmHWM") - before)


def memory(name: str) -> int:
    """Bytes, as Linux counts them for this process."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return 1024 * int(line.split()[1])


def main() -> None:
    print(f"{'':8}  {'tokens':>6}  {'peak MiB':>8}  {'logits MiB':>10}  {'beside MiB':>10}  {'float32 copy MiB':>16}")
    for dtype, tokens in CASES:
        command = [sys.executable, __file__, dtype, str(tokens)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        peak, elements = int(done.stdout.split()[-1]) / MIB, tokens * VOCABULARY / MIB
        logits = elements * (2 if dtype == "bfloat16" else 4)
        print(f"{dtype:8}  {tokens:>6}  {peak:>8.0f}  {logits:>10.0f}  {peak - logits:>10.0f}  {4 * elements:>16.0f}")


if __name__ == "__main__":
    measure(sys.argv[1], int(sys.argv[2])) if len(sys.argv) > 1 else main()
