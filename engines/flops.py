"""Floating-point operations of a model's passes, and how many a GPU can do: what MFU and balance are computed from."""

from collections.abc import Iterable, Sequence
from typing import Literal

from milepost.engines.model_layout import ModelShape
from milepost.storage.micro_batches import TOKENS, Cost

# Dense bfloat16 of one GPU, from NVIDIA's data sheets, whose larger figures are with sparsity; GeForce and RTX from the
# white papers of their architectures, with float32 accumulation. A key is words of the device's name.
PEAKS = {
    "A10": 125e12,
    "A30": 165e12,
    "A40": 149.7e12,
    "A100": 312e12,
    "A800": 312e12,
    "B200": 2250e12,
    "B300": 2250e12,
    "GB200": 2500e12,
    "GB300": 2500e12,
    "GH200": 989e12,
    "H20": 148e12,
    "H100": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H200": 989e12,
    "H200 NVL": 835e12,
    "H800": 989e12,
    "L4": 121e12,
    "L40": 181e12,
    "L40S": 362e12,
    "RTX 3090": 71e12,
    "RTX 4090": 165e12,
}


def forward_flops(shape: ModelShape, length: int) -> float:
    """Of one sequence of `length` tokens: 2 for each token and weight, and causal attention, half of every pair.

    Embeddings are looked up, and norms are too small to count.
    """
    token, pair = sample_cost(shape, "flops")
    return 2.0 * length * (token + length * pair)


def sample_cost(shape: ModelShape, balance: Literal["tokens", "flops"]) -> Cost:
    """What ranks are balanced by: tokens, or half of the operations of a forward pass."""
    if balance == "tokens":
        return TOKENS
    query, key_value = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    layer = shape.hidden * (2 * query + 2 * key_value + 3 * shape.intermediate)
    return shape.layers * layer + shape.vocab * shape.hidden, shape.layers * query


def training_flops(shape: ModelShape, lengths: Iterable[int]) -> float:
    """Forward and backward passes over sequences of `lengths`: 6 for each token and weight.

    Activations that are computed again do not count.
    """
    return 3 * sum(forward_flops(shape, length) for length in lengths)


def throughput(
    shape: ModelShape, lengths: Sequence[int], seconds: float, *, ranks: int, peak: float | None
) -> dict[str, float]:
    """What an optimizer step over sequences of `lengths` came to: of all ranks, but TFLOP/s and MFU of one.

    MFU is the share of `peak`, and absent where that is not known.
    """
    tokens, seconds = sum(lengths), max(seconds, 1e-9)
    flops = training_flops(shape, lengths) / seconds / ranks
    found = {
        "samples": float(len(lengths)),
        "tokens": float(tokens),
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "tflops": flops / 1e12,
    }
    return found | ({"mfu": flops / peak} if peak else {})


def peak_flops(device: str, dtype: str) -> float | None:
    """What the GPU of that name does a second; None when that is not known, as of a slice of one."""
    words = set(device.replace("-", " ").split())
    if dtype != "bfloat16" or "MIG" in words:
        return None
    known = [name for name in PEAKS if words.issuperset(name.split())]
    return PEAKS[max(known, key=lambda name: len(name.split()))] if known else None
