"""Parameters of the update: from kept samples to new weights."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, field_validator

from milepost.storage.section import Section

Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]


class AlgorithmSection(Section):
    """Advantages, loss, and the optimizer steps of a step."""

    advantage: str = "grpo"
    """Advantage estimator: a built-in, such as `dr_grpo` or `reinforce_plus_plus`, an entry point, or `pkg.mod:fn`.

    `gae` trains a critic beside the policy, which is PPO.
    """
    loss: str = "ppo_clip"
    """Policy loss: a built-in, an entry point, or `pkg.mod:fn`."""
    global_batch_size: PositiveInt | None = None
    """Samples an optimizer step."""
    num_steps_per_rollout: PositiveInt | None = None
    """Optimizer steps a step."""
    normalize_std: bool = True
    """Divide group advantages by the group's standard deviation; `grpo` and `gspo` do."""
    whiten_advantages: bool = False
    """Shift and scale advantages to mean 0 and variance 1 over all trained tokens of a step.

    `reinforce_plus_plus` and `reinforce_plus_plus_baseline` do so always.
    """
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount of later tokens' rewards; of `reinforce_plus_plus` and `gae`."""
    gae_lambda: Fraction = 1.0
    """Of `gae`: what later tokens' surprises count beside a token's own. With 1 only what was rewarded counts."""
    kl_loss_coef: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Weight, in the loss, of the policy's divergence from the reference policy."""
    kl_reward_coef: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Weight of the divergence as a penalty on each token's reward, in place of the loss.

    It is that of the policy before the step, for `reinforce_plus_plus`, `reinforce_plus_plus_baseline` and `gae`.
    """
    kl_estimator: Literal["k1", "k2", "k3", "low_var"] = "low_var"
    """How a token's divergence is estimated from its log-probabilities.

    With x the policy's minus the reference's: k1 is x, k2 is x^2 / 2, k3 is exp(-x) - 1 + x, and low_var is k3 within
    bounds.
    """
    kl_unbiased: bool = False
    """Multiply each token's divergence in the loss by the ratio of the policy to that before the step."""
    clip_low: Fraction = 0.2
    """Lower clip range of the probability ratio: 1 - clip_low."""
    clip_high: NonNegativeFloat | None = None
    """Upper clip range, 1 + clip_high; clip_low when empty."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Of `ppo_clip` and `gspo`: the loss of a negative advantage is at most this many times the advantage."""
    tau_positive: PositiveFloat = 1.0
    """Of `sapo`: how soon the gate closes where the advantage is positive."""
    tau_negative: PositiveFloat = 1.05
    """Of `sapo`: how soon the gate closes where the advantage is negative."""
    loss_options: dict[str, str | float | int | bool] = {}
    """Further parameters of a loss that is not built in, by name."""
    aggregation: Literal["sample_mean", "token_mean", "constant"] = "sample_mean"
    """How token losses become one number: mean of sample means, mean of tokens, or sum over a constant."""
    max_length: PositiveInt | None = None
    """The constant, times the number of samples; empty for `rollout.max_new_tokens`."""
    entropy_coef: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Weight, in the loss, of a bonus for the entropy of the distributions that tokens were taken from."""
    log_entropy: bool = False
    """Measure that entropy also without a bonus, and give it to a loss that is not built in; it takes more time."""
    max_skipped_steps: PositiveInt = 3
    """Optimizer steps in a row that may be skipped because loss or gradient are not finite; one more fails the run."""
    old_logprobs: Literal["recompute", "rollout"] = "recompute"
    """Where the ratio's denominator comes from: the trainer before the step, or the rollout engine.

    With `rollout` the trainer is not asked, so there is nothing to compare: the metrics `mismatch/` are left out.
    """

    @property
    def has_critic(self) -> bool:
        """Whether a critic is trained beside the policy."""
        return self.advantage == "gae"


class ReferenceSection(Section):
    """The frozen policy that the trained one is compared with."""

    path: str = ""
    """Its model: a folder, a GGUF file or `package:NAME`, of the same shape and vocabulary; empty for `model.path`.

    With a path its divergence is measured also where no `kl_` weight of the algorithm asks for it.
    """
    refresh_every_steps: NonNegativeInt = 0
    """Every so many steps the policy becomes the reference, as it then is; 0 for never."""


class CriticSection(Section):
    """The model that says how much reward is still to come, for `algorithm.advantage=gae`."""

    path: str = ""
    """The model it begins as, of the same shape: a folder, a GGUF file or `package:NAME`; empty for `model.path`."""
    lr: PositiveFloat = 1e-5
    """Its peak learning rate. All else of its optimizer, and the course of its schedule, is as the policy's."""
    warmup_steps: NonNegativeInt = 0
    """Its optimizer steps of linear warm-up from 0."""
    pretrain_steps: NonNegativeInt = 0
    """Steps at the beginning that train the critic alone, and leave the policy as it is."""
    value_clip: PositiveFloat = 0.2
    """How far a value may move in a step, from what it was before it, and still gain by it."""


class OptimizerSection(Section):
    """Adam and its schedule."""

    lr: PositiveFloat = 1e-6
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine", "inverse_sqrt", "wsd"] = "constant"
    """Learning rate over optimizer steps, once warm. `wsd` stays at the peak and decays at the end."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps of linear warm-up from `init_lr` to `lr`, which every schedule begins with."""
    init_lr: NonNegativeFloat = 0.0
    """Learning rate that warm-up begins with."""
    min_lr: NonNegativeFloat = 0.0
    """Lowest learning rate of a schedule that decays, and what it has after `decay_steps`."""
    decay_steps: PositiveInt | None = None
    """Optimizer step, warm-up included, at which a schedule that decays ends; empty for the end of the run.

    That is worked out when the run begins: one that is given more steps later takes them at `min_lr`.
    """
    wsd_decay_steps: PositiveInt | None = None
    """Optimizer steps of the decay of `wsd`, the last before `decay_steps`."""
    wsd_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "linear"
    """How `wsd` decays."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay."""
    beta1: Decay = 0.9
    """Decay of Adam's first moment."""
    beta2: Decay = 0.95
    """Decay of Adam's second moment."""
    eps: PositiveFloat = 1e-8
    """Adam's denominator offset."""
    clip_grad: NonNegativeFloat = 1.0
    """Largest global gradient norm; 0 turns clipping off."""

    @field_validator("schedule", mode="before")
    @classmethod
    def _in_todays_words(cls, given: object) -> object:
        """What was called `warmup` is a part of every schedule now."""
        return "constant" if given == "warmup" else given

    @property
    def is_open(self) -> bool:
        """Whether it depends on the length of the run when the learning rate ends."""
        return self.schedule != "constant" and self.decay_steps is None

    def ending_at(self, optimizer_steps: int) -> Self:
        """With that end, if none is given and one is needed."""
        return self.model_copy(update={"decay_steps": optimizer_steps}) if self.is_open else self


def as_stored(optimizer: dict[str, Any]) -> dict[str, Any]:
    """The optimizer section of a record in today's words: before there was `init_lr`, `constant` did not warm up."""
    if "init_lr" in optimizer or optimizer.get("schedule", "constant") != "constant":
        return optimizer
    return optimizer | {"warmup_steps": 0}


class PerfSection(Section):
    """What fits in memory, and how fast it goes."""

    max_tokens_per_micro_batch: PositiveInt = 8192
    """Tokens of a forward and backward pass on one replica of the model, padding included; longer samples go alone."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of weights and activations in trainer and engines."""
    packing: bool = True
    """Put samples behind each other instead of padding them to one length."""
    balance: Literal["tokens", "flops"] = "tokens"
    """What data-parallel ranks have equal shares of: tokens, or work, in which attention makes long samples dearer."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations that the backward pass computes again instead of keeping them."""
    compile: bool = False
    """Compile each layer with torch.compile."""
    colocate: bool = False
    """Trainer and rollout engines share GPUs: each gives its memory up while the other works."""
    train_threads: NonNegativeInt = 0
    """CPU threads of each trainer rank; 0 lets torch choose."""
