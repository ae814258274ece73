"""Megatron-core's GPTModel, DistributedDataParallel and DistributedOptimizer for a Hugging Face model folder.

Gradients are summed over micro-batches and data-parallel ranks, never averaged: losses are shares of the batch's loss.
"""

import math
from importlib.util import find_spec
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch.nn.functional import silu

from milepost.engines.megatron_head import HiddenModel
from milepost.engines.megatron_layers import block_spec
from milepost.engines.model_layout import ModelShape, Rope
from milepost.storage.parameters import ModelSection
from milepost.storage.training import OptimizerSection, PerfSection

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def device() -> torch.device:
    """Where this rank's model lives: its one GPU, or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _leave_empty(weight: Tensor) -> None:
    """Weights are read from the model folder. Without an initialization Megatron would not mark them as slices."""


_RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


def transformer_config(shape: ModelShape, model: ModelSection, perf: PerfSection) -> TransformerConfig:
    dtype = DTYPES[perf.dtype]
    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.intermediate,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        activation_func=silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=model.tensor_parallel,
        sequence_parallel=model.sequence_parallel,
        context_parallel_size=model.context_parallel,
        pipeline_model_parallel_size=model.pipeline_parallel,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        variable_seq_lengths=model.pipeline_parallel > 1,
        moe_token_dispatcher_type="alltoall",  # the default is refused with variable lengths, experts or not
        calculate_per_token_loss=True,  # sums instead of averages over micro-batches and ranks
        init_method=_leave_empty,
        output_layer_init_method=_leave_empty,
        embedding_init_method=_leave_empty,
        gradient_accumulation_fusion=find_spec("fused_weight_gradient_mlp_cuda") is not None,  # apex's kernel
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        persist_layer_norm=False,
        **_RECOMPUTE[perf.recompute],
    )


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Angle per position of each pair of a head's dimensions, `[head_dim / 2]` float32, as transformers has it."""
    inverse = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    if rope.kind == "linear":
        return inverse / rope.factor
    if rope.kind == "llama3":
        return _llama3(inverse, rope)
    return inverse


def _llama3(inverse: Tensor, rope: Rope) -> Tensor:
    """Long wavelengths slowed by `factor`, short ones kept, a linear blend between (arXiv:2407.21783)."""
    wavelength = 2 * math.pi / inverse
    low, high = rope.low_freq_factor, rope.high_freq_factor
    scaled = torch.where(wavelength > rope.original_context / low, inverse / rope.factor, inverse)
    blend = (rope.original_context / wavelength - low) / (high - low)
    smooth = (1 - blend) * scaled / rope.factor + blend * scaled
    between = (wavelength >= rope.original_context / high) & (wavelength <= rope.original_context / low)
    return torch.where(between, smooth, scaled)


class Rotary(torch.nn.Module):
    """Angles of the positions `places`, `[time]`, in place of Megatron's, which counts from the start of a row."""

    places: Tensor

    def __init__(self, inverse: Tensor) -> None:
        super().__init__()
        self._inverse = inverse  # no buffer: it stays float32

    def get_rotary_seq_len(self, *args: Any) -> int:
        return int(self.places.numel())

    def forward(self, length: int, **options: Any) -> Tensor:
        angles = torch.outer(self.places.to(self._inverse.dtype), self._inverse)
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]


def build_model(shape: ModelShape, model: ModelSection, perf: PerfSection) -> GPTModel:
    """This rank's slice of the model, up to hidden states, on its device, with weights that are still to be loaded."""
    config = transformer_config(shape, model, perf)
    gpt = HiddenModel(
        config=config,
        transformer_layer_spec=block_spec(config),
        vocab_size=shape.padded_vocab(model.tensor_parallel),
        max_sequence_length=shape.context,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=shape.tied,
        position_embedding_type="rope",
        rotary_base=shape.rope.theta,
    )
    gpt.rotary_pos_emb = Rotary(inverse_frequencies(shape.rope, shape.head_dim).to(device()))
    if compiles(perf):
        compile_layers(gpt)
    return gpt.to(device=device(), dtype=DTYPES[perf.dtype])


def compile_layers(gpt: GPTModel, backend: str = "inductor") -> None:
    """Each layer as one graph, which all layers share."""
    torch._dynamo.config.recompile_limit = 64  # with and without gradients, one sample and several, any lengths
    gpt.decoder.register_forward_pre_hook(_own_input, with_kwargs=True)
    for layer in gpt.decoder.layers:
        layer.forward = torch.compile(layer.forward, backend=backend)


def _own_input(decoder: Any, positional: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The embeddings as a tensor like those between layers: as Megatron's view, they need a graph of their own."""
    embedded = named["hidden_states"]
    if embedded is not None:
        named["hidden_states"] = embedded.clone(memory_format=torch.contiguous_format)
    return positional, named


def compiles(perf: PerfSection) -> bool:
    """Whether this rank compiles what it runs: Megatron's code on a CPU runs under the shim, which is not compiled."""
    return perf.compile and torch.cuda.is_available()


def _sum_gradients(model: list[Any], num_tokens: Tensor | None = None, **groups: Any) -> None:
    """Megatron's gradient reduction without its division by a token count."""
    finalize_model_grads(model, None, **groups)


def wrap_model(gpt: GPTModel) -> DistributedDataParallel:
    """`gpt` with its gradients in float32 buffers that are reduced over data-parallel ranks."""
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=True, overlap_grad_reduce=False, check_for_nan_in_grad=False
    )
    wrapped = DistributedDataParallel(config=gpt.config, ddp_config=config, module=gpt)
    gpt.config.no_sync_func = wrapped.no_sync
    gpt.config.finalize_model_grads_func = _sum_gradients
    return wrapped


def build_optimizer(model: DistributedDataParallel, optimizer: OptimizerSection, perf: PerfSection) -> Any:
    """Adam whose state is split over data-parallel ranks. Build it after the weights are loaded: it copies them."""
    dtype = DTYPES[perf.dtype]
    config = OptimizerConfig(
        optimizer="adam",
        lr=optimizer.lr,
        min_lr=0.0,
        weight_decay=optimizer.weight_decay,
        adam_beta1=optimizer.beta1,
        adam_beta2=optimizer.beta2,
        adam_eps=optimizer.eps,
        clip_grad=optimizer.clip_grad,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=True,
    )
    built = get_megatron_optimizer(config, [model], use_gloo_process_groups=False)
    for adam in torch_adams(built):
        _fill_moments(adam)
    return built


def set_rates(optimizer: Any, section: OptimizerSection, *, lr: float) -> None:
    """How the next step is taken. Megatron's groups say which weights decay: not norms and biases."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_mult", 1.0)
        group["weight_decay"] = section.weight_decay * group.get("wd_mult", 1.0)
        group["betas"], group["eps"] = (section.beta1, section.beta2), section.eps
    for part in parts(optimizer):
        part.config.clip_grad = section.clip_grad


def parts(optimizer: Any) -> list[Any]:
    """The DistributedOptimizers in what Megatron's factory returned."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def torch_adams(optimizer: Any) -> list[torch.optim.Adam]:
    """Torch's Adams in a Megatron optimizer: none where a fused one is installed, which counts steps its own way."""
    return [part.optimizer for part in parts(optimizer) if isinstance(part.optimizer, torch.optim.Adam)]


def step_count(steps: int, parameter: Tensor) -> Tensor:
    """Adam's count of its steps: on the GPU, where a fused Adam wants it."""
    return torch.tensor(float(steps), device=parameter.device)


def _fill_moments(adam: torch.optim.Adam) -> None:
    """Give Adam the state it otherwise makes at its first step, because a checkpoint can be wanted before."""
    for group in adam.param_groups:
        # Megatron's factory has no option for it: one kernel a step instead of one for each operation.
        group["fused"] = torch.cuda.is_available()
        for parameter in group["params"]:
            adam.state[parameter] = {
                "step": step_count(0, parameter),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
