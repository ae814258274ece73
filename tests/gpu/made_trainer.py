"""A Megatron trainer with random weights of a Qwen3's shape, in this process, and batches for it."""

import contextlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from milepost.engines import cluster, megatron_world
from milepost.engines.losses import get_loss
from milepost.engines.megatron_batch import MicroBatch, Sample, loss_columns, micro_batch
from milepost.engines.megatron_memory import Parked
from milepost.engines.megatron_model import (
    build_model,
    build_optimizer,
    compile_layers,
    device,
    set_rates,
    wrap_model,
)
from milepost.engines.megatron_step import PolicyPasses, denominators
from milepost.engines.model_layout import read_shape
from milepost.storage.parameters import ModelSection
from milepost.storage.training import OptimizerSection, PerfSection

NAMES = "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"
SIZES: dict[str, tuple[int, ...]] = {
    "0.6B": (1024, 3072, 28, 16, 8),
    "1.7B": (2048, 6144, 28, 16, 8),
    "4B": (2560, 9728, 36, 32, 8),
    "tiny": (64, 192, 2, 4, 2),
}


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


@dataclass(frozen=True)
class Variant:
    """How a trainer is compiled, and whether its kernels must add in one order."""

    compiled: bool = True
    deterministic: bool = True
    cpp_wrapper: bool = False

    def settings(self) -> contextlib.AbstractContextManager[Any]:
        """In which it is built and runs: launches from C++ in place of Python, or not."""
        from torch._inductor import config

        patch: contextlib.AbstractContextManager[Any] = config.patch(cpp_wrapper=self.cpp_wrapper)
        return patch


VARIANTS = {
    "eager": Variant(compiled=False),
    "layers": Variant(),
    "layers-any-order": Variant(deterministic=False),
    "layers-cpp": Variant(cpp_wrapper=True),
}


class Trainer:
    """What MegatronRank is made of, with random weights, and without tables."""

    def __init__(self, size: str, perf: PerfSection, variant: str) -> None:
        self.size, self.variant, self.perf = size, variant, perf
        chosen = VARIANTS[variant]
        self.shape, model = read_shape(hf_config(size)), ModelSection()
        megatron_world.keep_to_loopback(cluster.LOOPBACK)
        store = megatron_world.open_store(cluster.LOOPBACK, 1)
        megatron_world.join_world(store, rank=0, world=1, model=model)
        megatron_world.seed_streams(0)
        if not chosen.deterministic:
            torch.use_deterministic_algorithms(False)
        gpt = build_model(self.shape, model, perf)
        compiled = chosen.compiled and torch.cuda.is_available()
        if compiled:
            compile_layers(gpt)
        with torch.no_grad():
            for parameter in gpt.parameters():
                parameter.normal_(0.0, 0.02) if parameter.dim() > 1 else parameter.fill_(1.0)
        self.gpt, self.model = gpt, wrap_model(gpt)
        self.optimizer = build_optimizer(self.model, OptimizerSection(), perf)
        self.passes = PolicyPasses(self.model, self.shape, 1.0, compiled=compiled)
        self.parked = Parked()

    def micro_batches(self, lengths: list[int], count: int) -> tuple[list[Sample], list[MicroBatch]]:
        """`count` micro-batches of sequences of `lengths`, three quarters of each a response."""
        samples: list[Sample] = []
        random, batches = np.random.default_rng(0), []
        for _ in range(count):
            made = [_sample(random, length, self.shape.vocab, len(samples)) for length in lengths]
            samples += made
            batches.append(micro_batch(made, loss_columns(made), device(), packing=self.perf.packing))
        return samples, batches

    def step(self, samples: list[Sample], batches: list[MicroBatch]) -> None:
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.passes.gradients(batches, get_loss("ppo_clip"), {}, denominators(samples))
        set_rates(self.optimizer, OptimizerSection(), lr=1e-6)
        self.optimizer.step()


def _sample(random: np.random.Generator, length: int, vocab: int, row: int) -> Sample:
    """One that takes `length` positions: its last token predicts nothing."""
    tokens = random.integers(0, vocab, length + 1, dtype=np.int32)
    prompt = max(1, length // 4)
    ones = np.ones(length + 1 - prompt, np.float32)
    columns = {"loss_mask": ones, "advantages": ones, "old_logprobs": -12 * ones}
    return Sample(row, str(row), tokens[:prompt], tokens[prompt:], columns)
