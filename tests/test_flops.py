"""Floating-point operations by hand, and peaks by the names that devices give themselves."""

import pytest

from milepost.engines.flops import forward_flops, peak_flops, throughput, training_flops
from milepost.engines.model_layout import ModelShape, Rope

SHAPE = ModelShape("llama", 2, 4, 6, 2, 1, 3, 10, 64, 1e-6, False, Rope(1e4))


def test_each_weight_counts_twice_a_token_and_attention_half_of_every_pair() -> None:
    layer = 4 * 6 + 2 * (4 * 3) + 6 * 4 + 3 * (4 * 6)  # queries, keys and values, output, feed-forward
    weights = 2 * layer + 10 * 4  # and the output layer
    attention = 2 * 2 * (5 * 5 * 6)  # layers; scores and values, 2 operations for each of half the pairs and dimension
    assert forward_flops(SHAPE, 5) == 2 * weights * 5 + attention


def test_training_is_three_forward_passes_and_sequences_do_not_see_each_other() -> None:
    assert training_flops(SHAPE, [5, 7]) == 3 * (forward_flops(SHAPE, 5) + forward_flops(SHAPE, 7))
    assert training_flops(SHAPE, [12]) > training_flops(SHAPE, [5, 7])


def test_a_step_is_told_in_tokens_of_all_ranks_and_flops_of_one() -> None:
    found = throughput(SHAPE, [5, 7], 2.0, ranks=4, peak=1e4)
    assert (found["samples"], found["tokens"], found["seconds"], found["tokens_per_second"]) == (2, 12, 2.0, 6.0)
    assert found["tflops"] == pytest.approx(training_flops(SHAPE, [5, 7]) / 2.0 / 4 / 1e12)
    assert found["mfu"] == pytest.approx(found["tflops"] * 1e12 / 1e4)
    assert "mfu" not in throughput(SHAPE, [5], 2.0, ranks=1, peak=None)


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA L4", 121e12),
        ("Tesla T4", None),
    ],
)
def test_the_peak_of_a_device_is_known_by_its_name(device: str, peak: float | None) -> None:
    assert peak_flops(device, "bfloat16") == peak
    assert peak_flops(device, "float32") is None
