"""Bytes of a step of weights as changes, by the size of the step. Run as `python tests/bench/bench_transport.py`.

A step of Adam moves a weight by about the learning rate, whatever the gradient; it is made up here.
"""

import sys
import tempfile
import time
from pathlib import Path

import torch

from milepost.engines.protocols import WeightVersion
from milepost.engines.tiny_model import write_tiny_model
from milepost.engines.tokenizer import load_tokenizer, write_character_tokenizer
from milepost.engines.weight_chain import rebuild
from milepost.engines.weight_exports import Exports
from milepost.engines.weight_folders import folder_bytes

RATES = (1e-6, 1e-5, 1e-4)


def master_weights(folder: str) -> dict[str, torch.Tensor]:
    return {name: tensor.float() for name, tensor in rebuild(folder).items()}


def measure(folder: str, rate: float, dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    noise, exports = torch.Generator().manual_seed(0), Exports(folder, name)
    master = master_weights(folder)
    with tempfile.TemporaryDirectory() as root:
        sizes, seconds = [], []
        for step in range(3):
            begun, uri = time.monotonic(), f"{root}/{step}"
            digest = exports.write(((key, value.to(dtype, copy=True)) for key, value in master.items()), uri, "delta")
            exports.named(uri, WeightVersion(step, digest))
            seconds.append(time.monotonic() - begun)
            sizes.append(folder_bytes(uri))
            for value in master.values():
                value += rate * torch.randn(value.shape, generator=noise)
        begun = time.monotonic()
        rebuild(f"{root}/2")
        back = time.monotonic() - begun
    print(
        f"{name:9} rate {rate:g}: full {sizes[0] / 1e6:.1f} MB in {seconds[0]:.2f} s, changes {sizes[2] / 1e6:.2f} MB "
        f"({sizes[2] / sizes[0]:.1%}) in {seconds[2]:.2f} s, rebuilt from the full folder in {back:.2f} s"
    )


def main() -> None:
    """Of the model folder that is named, or of a random model of 13 million parameters."""
    with tempfile.TemporaryDirectory() as made:
        folder = sys.argv[1] if len(sys.argv) > 1 else made
        if folder == made:
            write_character_tokenizer(made, "0123456789+-*=")
            size = load_tokenizer(made).vocab_size
            write_tiny_model(made, vocab_size=size, hidden=512, layers=4, heads=8, kv_heads=4, seed=0)
        assert Path(folder, "config.json").exists(), f"{folder} is no model folder"
        for dtype in (torch.bfloat16, torch.float32):
            for rate in RATES:
                measure(folder, rate, dtype)


if __name__ == "__main__":
    main()
