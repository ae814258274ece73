"""Policy losses on padded `[batch, time]` tensors: a loss for every token, and what is added to it and shown of it.

What holds for all of them, and how token losses become one number, is in engines/loss_inputs.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from milepost.engines.divergence import kl
from milepost.engines.loss_inputs import (
    Denominators,
    Loss,
    LossInputs,
    LossOutputs,
    aggregate,
    checked_mask,
    clean,
    count,
    row_tokens,
)
from milepost.engines.loss_params import LOSSES, LossParams, check_loss, load_loss, loss_params

__all__ = ["Denominators", "Loss", "LossInputs", "LossOutputs", "check_loss", "count", "get_loss", "kl", "policy_loss"]

LOG_RATIO_LIMIT = 20.0  # exp of it is still a finite float32


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

    def row_means(self, values: Tensor) -> Tensor:
        """The mean over each sample's trained tokens, `[batch, 1]`."""
        return clean(self.mask, values).sum(dim=1, keepdim=True) / row_tokens(self.mask)


def _batch(inputs: LossInputs) -> _Batch:
    read = {name: getattr(inputs, name) for name in ("logprobs", "old_logprobs", "advantages")}
    mask = checked_mask(inputs.loss_mask, **read)
    cleaned = {name: clean(mask, tensor) for name, tensor in read.items()}
    return _Batch(mask, cleaned["logprobs"], cleaned["old_logprobs"].detach(), cleaned["advantages"].detach())


def _ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _moved_away(batch: _Batch, delta: float) -> Tensor:
    """Tokens of negative advantage in samples that the policy has left by more than `delta` a token (arXiv:2512.02556).

    It is measured as the sample's mean of old minus new log-probabilities.
    """
    return (batch.advantages < 0) & (-batch.row_means(batch.log_ratio.detach()) > delta)


def _penalty(inputs: LossInputs, batch: _Batch, params: LossParams) -> Tensor | None:
    """The divergence from the reference at each token, where the batch has one.

    Unbiased, it is multiplied by the ratio to the old policy, through which the gradient flows too (arXiv:2512.02556):
    of tokens that the old policy sampled, k1 and k3 then have the divergence and its gradient as their means.
    """
    if inputs.ref_logprobs is None:
        if params.kl_coef:
            raise ValueError(
                f"kl_coef is {params.kl_coef:g} but the batch has no ref_logprobs: fill them or set kl_coef to 0"
            )
        return None
    estimate = kl(params.kl_estimator, batch.logprobs, clean(batch.mask, inputs.ref_logprobs).detach())
    return estimate * _ratio(batch.log_ratio) if params.kl_unbiased else estimate


def _entropy(inputs: LossInputs, batch: _Batch, params: LossParams) -> Tensor | None:
    if inputs.entropy is None:
        if params.entropy_coef:
            raise ValueError(
                f"entropy_coef is {params.entropy_coef:g} but the batch has no entropy: give it or set it to 0"
            )
        return None
    checked_mask(inputs.loss_mask, entropy=inputs.entropy)
    return clean(batch.mask, inputs.entropy)


def _outputs(
    inputs: LossInputs,
    batch: _Batch,
    params: LossParams,
    token_loss: Tensor,
    token_metrics: dict[str, Tensor],
    *,
    compares: bool = True,
) -> LossOutputs:
    """The policy's token losses, weighted, with reference penalty and entropy bonus, as one number.

    A loss that `compares` nothing with the old policy says nothing of it either: its log-probabilities may be made up.
    """

    def total(values: Tensor) -> Tensor:
        return aggregate(
            values, batch.mask, inputs.denominators, aggregation=params.aggregation, max_length=params.max_length
        )

    away = {"ppo_kl": -batch.log_ratio, "ratio_mean": _ratio(batch.log_ratio)} if compares else {}
    shown = {**away, **token_metrics}
    if inputs.importance_weights is not None:
        weights = clean(batch.mask, inputs.importance_weights).detach()
        token_loss = torch.where(weights == 0, 0.0, token_loss * weights)
    if params.opsm_delta is not None:
        moved = _moved_away(batch, params.opsm_delta)
        shown["opsm_clipfrac"] = moved.to(token_loss.dtype)
        token_loss = torch.where(moved, 0.0, token_loss)
    policy = loss = total(token_loss)
    penalty, entropy = _penalty(inputs, batch, params), _entropy(inputs, batch, params)
    if penalty is not None:
        shown["ref_kl"] = penalty
        if params.kl_coef:  # zero times a reference that is not finite would not be zero
            loss = loss + params.kl_coef * total(penalty)
    if entropy is not None:
        shown["entropy"] = entropy
        if params.entropy_coef:
            loss = loss - params.entropy_coef * total(entropy)
    tokens = max(inputs.denominators.tokens, 1.0)
    metrics = {name: clean(batch.mask, value.detach()).sum() / tokens for name, value in shown.items()}
    effective = {"ess_ratio": _effective(inputs, batch)} if compares else {}
    return LossOutputs(loss, {"pg_loss": policy.detach(), **effective, **metrics})


def _effective(inputs: LossInputs, batch: _Batch) -> Tensor:
    """The samples' mean share of tokens that their ratios leave: 1 when all ratios are equal, 1/n when one is all."""
    ratio = clean(batch.mask, _ratio(batch.log_ratio.detach()))
    squares = (ratio**2).sum(dim=1, keepdim=True).clamp(min=1e-8)
    shares = ratio.sum(dim=1, keepdim=True) ** 2 / (row_tokens(batch.mask) * squares)
    return shares.sum() / max(inputs.denominators.samples, 1.0)


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
    mean = batch.row_means(batch.log_ratio)
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
    batch, options = _batch(inputs), replace(loss_params(params), opsm_delta=None)
    return _outputs(inputs, batch, options, -batch.logprobs, {"nll": -batch.logprobs}, compares=False)


def get_loss(name: str) -> Loss:
    """The loss called `name`: a callable `(LossInputs, params) -> LossOutputs`.

    One that is not built in may raise anything and return anything: it is named then, in a RuntimeError.
    """
    loss: Loss = load_loss(name)
    return loss if name in LOSSES else partial(_of_others, name, loss)


def _of_others(name: str, loss: Loss, inputs: LossInputs, params: Mapping[str, Any]) -> LossOutputs:
    try:
        outputs = loss(inputs, params)
    except Exception as error:
        raise RuntimeError(f"algorithm.loss {name!r} raised {type(error).__name__}: {error}") from error
    if not isinstance(outputs, LossOutputs):
        raise RuntimeError(f"algorithm.loss {name!r} returned {outputs!r}, expected LossOutputs of engines/losses.py")
    return outputs


def policy_loss(
    name: str,
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    ref_logprobs: Tensor | None = None,
    importance_weights: Tensor | None = None,
    entropy: Tensor | None = None,
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
        importance_weights=importance_weights,
        entropy=entropy,
    )
    return get_loss(name)(inputs, params)
