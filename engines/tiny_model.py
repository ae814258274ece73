"""Random models small enough to train on two CPU cores, as Hugging Face folders."""

from pathlib import Path
from typing import Literal

Family = Literal["qwen3", "llama", "qwen2"]


def write_tiny_model(
    directory: str,
    *,
    vocab_size: int,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    seed: int,
    family: Family = "qwen3",
    tie_embeddings: bool = True,
) -> None:
    """Write a float32 model with random weights; equal arguments give equal weights.

    It names no end token of its own: the tokenizer's holds.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from milepost.engines.embedded_weights import write_folder

    if hidden % heads or heads % kv_heads:
        raise ValueError(
            f"hidden {hidden}, heads {heads}, kv_heads {kv_heads}: heads must divide hidden, and kv_heads heads"
        )
    config = AutoConfig.for_model(
        family,
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        max_position_embeddings=4096,
        tie_word_embeddings=tie_embeddings,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    write_folder(model, Path(directory))
