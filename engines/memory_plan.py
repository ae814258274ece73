"""How much of a GPU's memory a run takes, worked out from its parameters before anything starts (no torch)."""

import os
import shutil
import subprocess
from dataclasses import dataclass
from typing import Any

from milepost.engines.model_layout import ModelShape, parameter_count, read_shape
from milepost.storage.parameters import Parameters

GIB = 1024**3
BYTES = {"float32": 4, "bfloat16": 2}
DRIVER_SECONDS = 30
CONTEXT_BYTES = 2 * GIB  # CUDA, NCCL, cuBLAS and what the allocator cannot use
LOGITS_BYTES = 3 * GIB  # of logits at once: 8,192 tokens of large vocabularies; those of more are made twice


@dataclass(frozen=True)
class TrainerMemory:
    """Bytes on each trainer rank's GPU, during a training step."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits + CONTEXT_BYTES


def trainer_memory(hf_config: dict[str, Any], parameters: Parameters) -> TrainerMemory:
    """Of one rank: an even share of what is trained, and micro-batches as large as they may be, of one model at a time.

    Gradients are float32; the optimizer has two float32 moments, and float32 main weights where the weights are not.
    """
    model, perf, shape = parameters.model, parameters.perf, read_shape(hf_config)
    size, split = BYTES[perf.dtype], model.tensor_parallel * model.pipeline_parallel
    count = -(-trained_parameters(hf_config, parameters) // split)
    state = 8 + (0 if perf.dtype == "float32" else 4)
    tokens = -(-max(perf.max_tokens_per_micro_batch, model.context_length) // model.context_parallel)
    # The first of several stages holds as many micro-batches as there are stages, so the division by them cancels.
    layers = shape.layers
    kept = {"none": _layer(shape, parameters, mlp=True), "selective": _layer(shape, parameters, mlp=False)}
    per_token = layers * kept.get(perf.recompute, shape.hidden) + _layer(shape, parameters, mlp=True)
    logits = size * tokens * shape.padded_vocab(model.tensor_parallel) // model.tensor_parallel
    return TrainerMemory(
        weights=size * count,
        gradients=4 * count,
        optimizer=state * count // (model.data_parallel * model.context_parallel),
        activations=int(size * tokens * per_token),
        logits=2 * min(logits, LOGITS_BYTES),
    )


def trained_parameters(hf_config: dict[str, Any], parameters: Parameters) -> int:
    """Of the policy, and of its critic if it has one, in whose head a token has one number."""
    policy, shape = parameter_count(hf_config), read_shape(hf_config)
    if not parameters.algorithm.has_critic:
        return policy
    return 2 * policy + shape.hidden - (0 if shape.tied else shape.vocab * shape.hidden)


def _layer(shape: ModelShape, parameters: Parameters, *, mlp: bool) -> float:
    """Elements that a layer keeps a token for its backward pass; attention keeps no scores."""
    model, query, key_value = parameters.model, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    whole = 4 * shape.hidden  # both residual streams and both normalised inputs
    projections = 3 * query + 4 * key_value  # before and after norm and rotation, and what attention returns
    gathered = (2 * model.context_parallel - 1) * key_value if model.context_parallel > 1 else 0  # of other ranks
    feed_forward = 4 * shape.intermediate if mlp else 0  # gate, up, the gate's activation and the product
    shared = (projections + gathered + feed_forward) / model.tensor_parallel
    return shared + whole / (model.tensor_parallel if model.sequence_parallel else 1)


def engine_weights(hf_config: dict[str, Any], parameters: Parameters) -> int:
    """Bytes of weights on each GPU of a rollout engine."""
    return parameter_count(hf_config) * BYTES[parameters.perf.dtype] // parameters.engines.gpus_per_engine


def cache_bytes(hf_config: dict[str, Any], parameters: Parameters) -> int:
    """Bytes of keys and values of one token on each GPU of a rollout engine."""
    shape = read_shape(hf_config)
    heads = max(1, shape.kv_heads // parameters.engines.gpus_per_engine)
    return 2 * shape.layers * heads * shape.head_dim * BYTES[parameters.perf.dtype]


def check_memory(hf_config: dict[str, Any], parameters: Parameters, gpu_bytes: int) -> None:
    """ValueError when a trainer rank or a rollout engine that this run starts needs more than a GPU has."""
    if parameters.engines.train == "megatron":
        _check_trainer(hf_config, parameters, gpu_bytes)
    if _starts_sglang(parameters):
        _check_engine(hf_config, parameters, gpu_bytes)


def _starts_sglang(parameters: Parameters) -> bool:
    return parameters.engines.rollout == "sglang" and not parameters.engines.sglang_urls


def _check_trainer(hf_config: dict[str, Any], parameters: Parameters, gpu_bytes: int) -> None:
    found = trainer_memory(hf_config, parameters)
    beside = 0
    if parameters.perf.colocate and _starts_sglang(parameters):
        beside = engine_weights(hf_config, parameters)  # while weights go over
    needed = max(found.total, found.total - found.activations - found.logits + beside)
    if needed <= gpu_bytes:
        return
    state = found.weights + found.gradients + found.optimizer
    if state + beside + CONTEXT_BYTES > gpu_bytes:
        knob = "raise model.tensor_parallel, model.pipeline_parallel or model.data_parallel"
    else:
        knob = "lower perf.max_tokens_per_micro_batch or set perf.recompute=full"
    batch = found.activations + found.logits
    raise ValueError(
        f"a trainer rank needs about {needed / GIB:.1f} GiB of GPU memory ({state / GIB:.1f} for weights, gradients "
        f"and optimizer, {batch / GIB:.1f} for a micro-batch), a GPU here has {gpu_bytes / GIB:.1f}: {knob}"
    )


def _check_engine(hf_config: dict[str, Any], parameters: Parameters, gpu_bytes: int) -> None:
    share = float(parameters.engines.sglang.get("mem_fraction_static", 1.0))
    weights = engine_weights(hf_config, parameters)
    cache = cache_bytes(hf_config, parameters) * parameters.model.context_length
    if weights + cache > share * gpu_bytes:
        raise ValueError(
            f"a rollout engine needs {weights / GIB:.1f} GiB of a GPU for weights and {cache / GIB:.1f} to cache one "
            f"request, and may take {share * gpu_bytes / GIB:.1f}: raise engines.gpus_per_engine or "
            "engines.sglang.mem_fraction_static, or lower model.context_length"
        )


class DriverSilent(RuntimeError):
    """There is an NVIDIA driver, and it does not answer."""


def gpu_bytes() -> int | None:
    """Memory of the smallest GPU of this machine; None where there is none, or none that may be used."""
    sizes = _gpu_sizes()
    return min(sizes) * 1024**2 if sizes else None


def gpu_count() -> int:
    """GPUs of this machine that may be used."""
    return len(_gpu_sizes())


def _gpu_sizes() -> list[int]:
    """Memory of each GPU in MiB."""
    command = shutil.which("nvidia-smi")
    if command is None or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return []
    query = [command, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=DRIVER_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DriverSilent(f"nvidia-smi does not answer: {error}") from None
    said = " ".join((done.stdout + done.stderr).split())
    if done.returncode and "No devices were found" not in said:
        raise DriverSilent(f"nvidia-smi ends with code {done.returncode}: {said}")
    return [int(line) for line in done.stdout.split() if line.isdigit()]
