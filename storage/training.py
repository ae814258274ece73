"""Parameters of the update: from kept samples to new weights."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from milepost.storage.section import Section

Fraction = Annotated[float, Field(ge=0, le=1)]


class AlgorithmSection(Section):
    """Advantages, loss, and the optimizer steps of a step."""

    advantage: str = "grpo"
    """Advantage estimator: a built-in, an entry point, or `pkg.mod:fn`."""
    loss: str = "ppo_clip"
    """Policy loss: a built-in, an entry point, or `pkg.mod:fn`."""
    global_batch_size: PositiveInt | None = None
    """Samples an optimizer step."""
    num_steps_per_rollout: PositiveInt | None = None
    """Optimizer steps a step."""
    normalize_std: bool = True
    """Divide group advantages by the group's standard deviation."""
    clip_low: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """Lower clip range of the probability ratio: 1 - clip_low."""
    clip_high: NonNegativeFloat | None = None
    """Upper clip range, 1 + clip_high; clip_low when empty."""
    aggregation: Literal["sample_mean", "token_mean", "constant"] = "sample_mean"
    """How token losses become one number: mean of sample means, mean of tokens, or sum over a constant."""
    max_skipped_steps: PositiveInt = 3
    """Optimizer steps in a row that may be skipped because loss or gradient are not finite; one more fails the run."""
    old_logprobs: Literal["recompute", "rollout"] = "recompute"
    """Where the ratio's denominator comes from: the trainer before the step, or the rollout engine."""


class OptimizerSection(Section):
    """Adam and its schedule."""

    lr: PositiveFloat = 1e-6
    """Peak learning rate."""
    schedule: Literal["constant", "warmup"] = "constant"
    """Learning rate over optimizer steps: constant, or linear from zero over `warmup_steps` and then constant."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps of linear warm-up."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay."""
    beta1: Fraction = 0.9
    """Decay of Adam's first moment."""
    beta2: Fraction = 0.95
    """Decay of Adam's second moment."""
    eps: PositiveFloat = 1e-8
    """Adam's denominator offset."""
    clip_grad: NonNegativeFloat = 1.0
    """Largest global gradient norm; 0 turns clipping off."""


class PerfSection(Section):
    """What fits in memory, and how fast it goes."""

    max_tokens_per_micro_batch: PositiveInt = 8192
    """Tokens of a forward and backward pass on one rank, padding included; longer samples go alone."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of weights and activations in trainer and engines."""
    packing: bool = True
    """Put samples behind each other instead of padding them to one length."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations that the backward pass computes again instead of keeping them."""
    compile: bool = False
    """Compile each layer with torch.compile."""
    colocate: bool = False
    """Trainer and rollout engines share GPUs: each gives its memory up while the other works."""
    train_threads: NonNegativeInt = 0
    """CPU threads of each trainer rank; 0 lets torch choose."""
