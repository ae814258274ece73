"""Policy losses on padded `[batch, time]` tensors, and how token losses become one number.

Denominators are global over the optimizer batch, so losses and metrics are additive shares: summed over micro-batches
and ranks they are the values of the whole batch, however it was split. A masked position is read by nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from milepost.engines.divergence import kl
from milepost.engines.loss_params import LossParams, check_loss, load_loss, loss_params

__all__ = ["Denominators", "Loss", "LossInputs", "LossOutputs", "check_loss", "count", "get_loss", "kl", "policy_loss"]

LOG_RATIO_LIMIT = 20.0  # exp of it is still a finite float32


@dataclass(frozen=True)
class Denominators:
    """Samples with a trained token, and trained tokens, in the whole optimizer batch: all micro-batches, all ranks."""

    samples: float
    tokens: float


@dataclass(frozen=True)
class LossInputs:
    """One micro-batch of whole samples. `logprobs` carries the gradient; `loss_mask` is 1 where a token is trained."""

    logprobs: Tensor
    old_logprobs: Tensor
    rollout_logprobs: Tensor | None
    ref_logprobs: Tensor | None
    advantages: Tensor
    loss_mask: Tensor
    denominators: Denominators


@dataclass(frozen=True)
class LossOutputs:
    """The micro-batch's share of the batch loss, and its shares of the batch's token means."""

    loss: Tensor
    metrics: dict[str, Tensor]


Loss = Callable[[LossInputs, Mapping[str, Any]], LossOutputs]


def count(loss_mask: Tensor | Sequence[Any]) -> Denominators:
    """The denominators of a batch: of a padded mask `[batch, time]`, or of one mask per sample (lists or tensors)."""
    trained = [int(torch.count_nonzero(torch.as_tensor(row))) for row in loss_mask]
    return Denominators(samples=float(sum(tokens > 0 for tokens in trained)), tokens=float(sum(trained)))


@dataclass(frozen=True)
class _Batch:
    """The inputs with every masked position at zero, in float32 or better."""

    mask: Tensor
    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor

    @property
    def log_ratio(self) -> Tensor:
        return self.logprobs - self.old_logprobs

    @property
    def row_tokens(self) -> Tensor:
        """Trained tokens of each sample, `[batch, 1]`, at least 1."""
        return self.mask.sum(dim=1, keepdim=True).clamp(min=1)


def _clean(mask: Tensor, tensor: Tensor) -> Tensor:
    """`tensor` with zeros where masked: `where`, because a product would keep NaN and infinity."""
    wide = tensor if tensor.dtype == torch.float64 else tensor.float()
    return torch.where(mask, wide, torch.zeros_like(wide))


def _batch(inputs: LossInputs) -> _Batch:
    mask = inputs.loss_mask.bool()
    for name in ("logprobs", "old_logprobs", "advantages"):
        shape = tuple(getattr(inputs, name).shape)
        if shape != tuple(mask.shape) or len(shape) != 2:
            raise ValueError(
                f"{name} has shape {shape}, loss_mask {tuple(mask.shape)}: both must be the same [batch, time]"
            )
    return _Batch(
        mask=mask,
        logprobs=_clean(mask, inputs.logprobs),
        old_logprobs=_clean(mask, inputs.old_logprobs).detach(),
        advantages=_clean(mask, inputs.advantages).detach(),
    )


def _ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _aggregate(values: Tensor, batch: _Batch, denominators: Denominators, params: LossParams) -> Tensor:
    """The micro-batch's share of the batch's one number."""
    values = _clean(batch.mask, values)
    if params.aggregation == "token_mean":
        return values.sum() / max(denominators.tokens, 1.0)
    if params.aggregation == "constant":
        return values.sum() / (max(denominators.samples, 1.0) * float(params.max_length or 1))
    return (values / batch.row_tokens).sum() / max(denominators.samples, 1.0)


def _outputs(
    inputs: LossInputs, batch: _Batch, params: LossParams, token_loss: Tensor, token_metrics: dict[str, Tensor]
) -> LossOutputs:
    """Token losses plus the reference penalty as one number, and every metric as a share of its token mean."""
    shown = {"ppo_kl": -batch.log_ratio, "ratio_mean": _ratio(batch.log_ratio), **token_metrics}
    if inputs.rollout_logprobs is not None:
        mismatch = batch.old_logprobs - _clean(batch.mask, inputs.rollout_logprobs)
        shown["rollout_logprob_abs_diff"] = mismatch.abs()
        shown["rollout_kl"] = kl("low_var", -mismatch, torch.zeros_like(mismatch))
    loss = _aggregate(token_loss, batch, inputs.denominators, params)
    if inputs.ref_logprobs is not None:
        reference = _clean(batch.mask, inputs.ref_logprobs).detach()
        shown["ref_kl"] = kl(params.kl_estimator, batch.logprobs, reference)
        if params.kl_coef:  # zero times a reference that is not finite would not be zero
            loss = loss + params.kl_coef * _aggregate(shown["ref_kl"], batch, inputs.denominators, params)
    elif params.kl_coef:
        raise ValueError(
            f"kl_coef is {params.kl_coef:g} but the batch has no ref_logprobs: fill them or set kl_coef to 0"
        )
    tokens = max(inputs.denominators.tokens, 1.0)
    return LossOutputs(loss, {name: _clean(batch.mask, value.detach()).sum() / tokens for name, value in shown.items()})


def _surrogate(batch: _Batch, log_ratio: Tensor, params: LossParams) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped surrogate, negated, and where the clipped branch was strictly the larger."""
    ratio = _ratio(log_ratio)
    free = -ratio * batch.advantages
    clipped = -ratio.clamp(*params.ratio_range) * batch.advantages
    loss = torch.maximum(free, clipped)
    if params.dual_clip is not None:
        bound = -params.dual_clip * batch.advantages
        loss = torch.where(batch.advantages < 0, torch.minimum(loss, bound), loss)
    return loss, {"pg_clipfrac": (clipped > free).to(loss.dtype)}


def ppo_clip(inputs: LossInputs, params: Mapping[str, Any]) -> LossOutputs:
    """PPO's clipped surrogate (arXiv:1707.06347), with separate bounds (arXiv:2503.14476) and an optional dual clip."""
    batch, options = _batch(inputs), loss_params(params)
    loss, metrics = _surrogate(batch, batch.log_ratio, options)
    return _outputs(inputs, batch, options, loss, metrics)


def gspo(inputs: LossInputs, params: Mapping[str, Any]) -> LossOutputs:
    """The clipped surrogate on the sequence's geometric mean ratio (arXiv:2507.18071)."""
    batch, options = _batch(inputs), loss_params(params)
    mean = batch.log_ratio.sum(dim=1, keepdim=True) / batch.row_tokens
    loss, metrics = _surrogate(batch, mean.expand_as(batch.logprobs), options)
    return _outputs(inputs, batch, options, loss, metrics)


def cispo(inputs: LossInputs, params: Mapping[str, Any]) -> LossOutputs:
    """Log-probabilities weighted by a clipped ratio without gradient (arXiv:2506.13585); `clip_low=1` has no floor."""
    batch, options = _batch(inputs), loss_params(params)
    ratio = _ratio(batch.log_ratio).detach()
    weight = ratio.clamp(*options.ratio_range)
    loss = -weight * batch.advantages * batch.logprobs
    return _outputs(inputs, batch, options, loss, {"pg_clipfrac": (weight != ratio).to(loss.dtype)})


def sapo(inputs: LossInputs, params: Mapping[str, Any]) -> LossOutputs:
    """A sigmoid gate around ratio 1 in place of the clip, with its own temperature per sign (arXiv:2511.20347)."""
    batch, options = _batch(inputs), loss_params(params)
    positive = torch.full_like(batch.logprobs, options.tau_positive)
    tau = torch.where(batch.advantages > 0, positive, torch.full_like(positive, options.tau_negative))
    gate = torch.sigmoid(tau * (_ratio(batch.log_ratio) - 1)) * 4 / tau
    return _outputs(inputs, batch, options, -gate * batch.advantages, {})


def policy_gradient(inputs: LossInputs, params: Mapping[str, Any]) -> LossOutputs:
    """REINFORCE: minus advantage times log-probability; the old policy is only measured against."""
    batch, options = _batch(inputs), loss_params(params)
    return _outputs(inputs, batch, options, -batch.advantages * batch.logprobs, {})


def sft(inputs: LossInputs, params: Mapping[str, Any]) -> LossOutputs:
    """Negative log-likelihood of the trained tokens; advantages are ignored."""
    batch, options = _batch(inputs), loss_params(params)
    return _outputs(inputs, batch, options, -batch.logprobs, {"nll": -batch.logprobs})


def get_loss(name: str) -> Loss:
    """The loss called `name`: a callable `(LossInputs, params) -> LossOutputs`."""
    loss: Loss = load_loss(name)
    return loss


def policy_loss(
    name: str,
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    ref_logprobs: Tensor | None = None,
    **params: Any,
) -> LossOutputs:
    """The loss called `name` on one whole batch of padded `[batch, time]` tensors; `params` are those of LossParams."""
    inputs = LossInputs(
        logprobs=logprobs,
        old_logprobs=old_logprobs,
        rollout_logprobs=None,
        ref_logprobs=ref_logprobs,
        advantages=advantages,
        loss_mask=loss_mask,
        denominators=count(loss_mask),
    )
    return get_loss(name)(inputs, params)
