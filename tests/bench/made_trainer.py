"""A Qwen3 with random weights on a CPU, a trainer rank that has it, and batches for both."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from milepost.engines.megatron_rank import MegatronRank
from milepost.engines.train_actors import TrainSetup
from milepost.storage.parameters import ModelSection
from milepost.storage.schema import ROLLOUTS, from_rows
from milepost.storage.tables import TableRef, write_table
from milepost.storage.training import OptimizerSection, PerfSection


def write_model(folder: Path, *, vocab: int, hidden: int, layers: int) -> str:
    """The folder of a model whose feed-forward layers are three times as wide, with heads of 64."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=max(2, hidden // 64),
        num_key_value_heads=max(1, hidden // 128),
        head_dim=64,
        tie_word_embeddings=True,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


def start_rank(model_dir: str, perf: PerfSection, optimizer: OptimizerSection | None = None) -> MegatronRank:
    setup = TrainSetup(model_dir, ModelSection(), optimizer or OptimizerSection(), perf, 1.0, 0)
    rank = MegatronRank(0, 1, setup)
    rank.connect(*rank.rendezvous())
    return rank


def samples(lengths: list[int], vocab: int) -> pa.Table:
    """Of those lengths, a quarter of each the prompt, ready to be trained on."""
    draw, rows = np.random.default_rng(0), []
    shared: dict[str, Any] = {name: "" for name in ROLLOUTS.names if ROLLOUTS.field(name).type == pa.string()}
    shared |= {"step": 0, "shard": 0, "turns": 1, "seed": 0, "response_escaped": False, "kept": True}
    for row, length in enumerate(lengths):
        tokens, prompt = draw.integers(0, vocab, length).tolist(), max(1, length // 4)
        count = length - prompt
        logprobs, ones = [-float(np.log(vocab))] * count, [1] * count
        filled = {"loss_mask": ones, "advantages": [1.0] * count, "rollout_logprobs": logprobs}
        ids = {"prompt_token_ids": tokens[:prompt], "response_token_ids": tokens[prompt:]}
        rows.append(shared | {"sample_id": str(row), "old_logprobs": logprobs} | ids | filled)
    return from_rows(rows, ROLLOUTS)


def write_batch(folder: Path, lengths: list[int], vocab: int) -> TableRef:
    return write_table(str(folder / "batch"), samples(lengths, vocab), ROLLOUTS)
