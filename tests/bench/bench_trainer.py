"""Tokens a second of the trainer on a CPU, beside a plain training step of transformers and torch.

`python tests/bench/bench_trainer.py [THREADS]`: the same model, samples, loss and number of threads, in two processes
that take turns. The plain one pads its micro-batches, which are sorted by length and have the same token budget.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

VOCABULARY, HIDDEN, LAYERS = 8192, 256, 6
BUDGET = 2048
ROUNDS = 3
CASES = {
    "equal lengths": [256] * 16,
    "log-normal lengths": np.random.default_rng(0).lognormal(5.2, 0.8, 20).clip(16, 1024).astype(int).tolist(),
}


def trainer(folder: Path, lengths: list[int], threads: int) -> Callable[[int], None]:
    """An optimizer step of this project, from the stored batch to changed weights."""
    from made_trainer import start_rank, write_batch

    from milepost.engines.protocols import UpdateParams
    from milepost.storage.training import PerfSection

    perf = PerfSection(max_tokens_per_micro_batch=BUDGET, train_threads=threads)
    rank, batch = start_rank(str(folder), perf), write_batch(folder, lengths, VOCABULARY)
    update = UpdateParams("policy_gradient", {"aggregation": "token_mean"})
    return lambda number: print(rank.step(batch, update, str(number)).metrics["loss"], file=sys.stderr)


def plain(folder: Path, lengths: list[int], threads: int) -> Callable[[int], None]:
    """The same as one would write it with the two libraries alone."""
    import torch
    from made_trainer import samples
    from transformers import AutoModelForCausalLM

    from milepost.storage.packing import pack_padded

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-6, betas=(0.9, 0.95), weight_decay=0.0)
    rows = samples(lengths, VOCABULARY).select(["prompt_token_ids", "response_token_ids"]).to_pylist()
    trained = sum(len(row["response_token_ids"]) for row in rows)

    def step(number: int) -> None:
        adam.zero_grad()
        for chosen in pack_padded(lengths, BUDGET):
            ids = torch.zeros(len(chosen), max(lengths[row] for row in chosen), dtype=torch.long)
            mask, response = torch.zeros_like(ids), torch.zeros_like(ids)
            for at, row in enumerate(chosen):
                prompt, said = rows[row]["prompt_token_ids"], rows[row]["response_token_ids"]
                ids[at, : lengths[row]] = torch.tensor(prompt + said)
                mask[at, : lengths[row]] = 1
                response[at, len(prompt) : lengths[row]] = 1
            logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
            taken = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
            (-(taken * response[:, 1:]).sum() / trained).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()

    return step


def work(kind: str, folder: str, case: str, threads: int) -> None:
    """Take a step for every line that is read, and say how long it took."""
    step = {"trainer": trainer, "plain": plain}[kind](Path(folder), CASES[case], threads)
    for number, _ in enumerate(sys.stdin):
        started = time.perf_counter()
        step(number)
        print(time.perf_counter() - started, flush=True)


def measure(folder: str, case: str, threads: int) -> dict[str, float]:
    """Seconds of a step of each, in the median; the first is to get warm."""
    started = {
        kind: subprocess.Popen(
            [sys.executable, __file__, kind, folder, case, str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for kind in ("trainer", "plain")
    }
    seconds: dict[str, list[float]] = {kind: [] for kind in started}
    for _ in range(1 + ROUNDS):
        for kind, process in started.items():
            process.stdin.write("\n")
            process.stdin.flush()
            seconds[kind].append(float(process.stdout.readline()))
    for process in started.values():
        process.communicate()
    return {kind: statistics.median(found[1:]) for kind, found in seconds.items()}


def main(threads: int) -> None:
    from made_trainer import write_model

    print(f"{threads} threads  {'trainer tokens/s':>18}  {'plain tokens/s':>14}  {'ratio':>5}")
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), vocab=VOCABULARY, hidden=HIDDEN, layers=LAYERS)
        for case, lengths in CASES.items():
            found = {kind: sum(lengths) / seconds for kind, seconds in measure(folder, case, threads).items()}
            ours, theirs = found["trainer"], found["plain"]
            print(f"{case:18}  {ours:>9.0f}  {theirs:>14.0f}  {ours / theirs:>5.2f}")


if __name__ == "__main__":
    if len(sys.argv) > 2:
        work(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
