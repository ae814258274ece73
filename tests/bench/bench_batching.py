"""How full micro-batches of log-normal lengths are, how even ranks are, and what processor time a batch takes to cut.

`python tests/bench/bench_batching.py`; balance by flops is that of a 0.6B model.
"""

import random
import time

from milepost.engines.flops import sample_cost
from milepost.engines.model_layout import ModelShape, Rope
from milepost.storage.micro_batches import PackingRules, micro_batches

BUDGET = 8192
REPEATS = 7
SHAPE = ModelShape("qwen3", 28, 1024, 3072, 16, 8, 128, 151936, 40960, 1e-6, True, Rope(1e6))
CASES = [(512, ranks, balance) for ranks in (1, 2, 4, 8) for balance in ("tokens", "flops")]
CASES += [(10_000, ranks, "tokens") for ranks in (1, 8, 64)]


def drawn(count: int) -> dict[int, int]:
    """Prompt and response of about 670 tokens in the median, and at most a budget."""
    draw = random.Random(0)
    return {row: min(BUDGET, 1 + int(draw.lognormvariate(6.5, 0.9))) for row in range(count)}


def main() -> None:
    print(f"{'sequences':>9}  {'ranks':>5}  {'balance':7}  {'passes':>6}  {'full':>6}  {'imbalance':>9}  {'ms':>6}")
    for count, ranks, balance in CASES:
        lengths, rules = drawn(count), PackingRules(ranks, BUDGET, True, balance)
        cost, seconds = sample_cost(SHAPE, balance), []
        for _ in range(REPEATS):
            started = time.process_time()
            cut = micro_batches(lengths, rules, cost)
            seconds.append(time.process_time() - started)
        found = cut.metrics(lengths)
        numbers = f"{found['micro_batches']:>6.0f}  {found['packing_efficiency']:>6.4f}  {found['imbalance']:>9.5f}"
        print(f"{count:>9}  {ranks:>5}  {balance:7}  {numbers}  {1e3 * min(seconds):>6.2f}")


if __name__ == "__main__":
    main()
