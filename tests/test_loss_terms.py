"""What weighs, joins and measures token losses, by hand-computed numbers, and parameters a loss has no use for."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from milepost.engines.loss_inputs import LossOutputs
from milepost.engines.loss_params import LOSSES, check_loss, wants_entropy
from milepost.engines.losses import policy_loss
from milepost.storage.parameters import Parameters
from milepost.tasks.update import update_params

WEIGHTED = [name for name in LOSSES if name != "sft"]


def row(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


def made(name: str = "ppo_clip", **changes: Any) -> LossOutputs:
    """Of three tokens that old and new policy agree about, with advantages 1, -1 and 2."""
    same = row(-1, -2, -3)
    given = {"logprobs": same, "old_logprobs": same, "advantages": row(1, -1, 2), "loss_mask": row(1, 1, 1)}
    return policy_loss(name, **{"aggregation": "token_mean", **given, **changes})


def test_an_importance_weight_multiplies_what_the_clip_left() -> None:
    new, old = row(math.log(1.5), 0.0), row(0.0, 0.0)
    outputs = made(
        logprobs=new, old_logprobs=old, advantages=row(1, 1), loss_mask=row(1, 1), importance_weights=row(0.5, 2)
    )
    assert float(outputs.loss) == pytest.approx(-(1.2 * 0.5 + 1.0 * 2) / 2)


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "gspo"])  # whose ratio is of whole samples
def test_a_rejected_token_is_not_learnt_from_and_still_counts(name: str) -> None:
    logprobs = row(-1, -2, math.inf).requires_grad_()
    outputs = made(name, logprobs=logprobs, loss_mask=row(1, 1, 1), importance_weights=row(1, 1, 0))
    outputs.loss.backward()
    assert logprobs.grad is not None and float(logprobs.grad[0, 2]) == 0
    two = made(
        name,
        logprobs=row(-1, -2),
        old_logprobs=row(-1, -2),
        advantages=row(1, -1),
        loss_mask=row(1, 1),
        aggregation="constant",
        max_length=3,
    )
    assert outputs.loss.item() == pytest.approx(two.loss.item())


def test_a_weight_leaves_reference_penalty_and_entropy_bonus_alone() -> None:
    terms = {"ref_logprobs": row(-1.5, -2, -3), "kl_estimator": "k1", "kl_coef": 0.3, "entropy_coef": 0.1}
    outputs = made(importance_weights=row(0, 0, 0), entropy=row(3, 2, 1), **terms)
    assert float(outputs.loss) == pytest.approx(0.3 * 0.5 / 3 - 0.1 * 2)
    assert float(outputs.metrics["pg_loss"]) == 0.0
    assert float(outputs.metrics["entropy"]) == pytest.approx(2)


@pytest.mark.parametrize("name", WEIGHTED)
def test_opsm_leaves_negative_samples_out_that_the_policy_has_left(name: str) -> None:
    """Of old minus new the means are 0.2, and -0.2 in the second row; only advantages below 0 are left out."""
    new = torch.tensor([[-1.3, -2.1], [-0.7, -1.9]])
    old = torch.tensor([[-1.0, -2.0], [-1.0, -2.0]])
    advantages, ones = torch.tensor([[-1.0, 1.0], [-1.0, 1.0]]), torch.ones(2, 2)
    given = {"logprobs": new, "old_logprobs": old, "advantages": advantages, "loss_mask": ones}
    by_hand = policy_loss(name, **given, importance_weights=torch.tensor([[0.0, 1], [1, 1]]))
    outputs = policy_loss(name, **given, opsm_delta=0.1)
    assert float(outputs.loss) == pytest.approx(float(by_hand.loss))
    assert float(outputs.metrics["opsm_clipfrac"]) == pytest.approx(0.25)
    assert float(policy_loss(name, **given, opsm_delta=0.3).metrics["opsm_clipfrac"]) == 0


def test_opsm_does_not_read_masked_tokens() -> None:
    outputs = made(old_logprobs=row(-1, -2, 90), loss_mask=row(1, 1, 0), opsm_delta=1e-4)
    assert float(outputs.metrics["opsm_clipfrac"]) == 0


def test_the_unbiased_penalty_is_weighted_by_the_ratio_and_its_gradient_flows_through_it() -> None:
    """At ratio 2 and x = ln 2, k1 is ln 2: the value is 2 ln 2, its slope 2 + 2 ln 2."""
    logprobs = row(math.log(0.5)).requires_grad_()
    given = {"old_logprobs": row(math.log(0.25)), "advantages": row(0), "loss_mask": row(1)}
    outputs = made(
        logprobs=logprobs, ref_logprobs=row(math.log(0.25)), kl_estimator="k1", kl_coef=1, kl_unbiased=True, **given
    )
    outputs.loss.backward()
    assert logprobs.grad is not None
    assert outputs.loss.item() == pytest.approx(2 * math.log(2))
    assert float(logprobs.grad) == pytest.approx(2 + 2 * math.log(2))
    assert float(outputs.metrics["ref_kl"]) == pytest.approx(2 * math.log(2))


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_unbiased_penalty_descends_the_divergence_itself(estimator: str) -> None:
    """Over all tokens of a vocabulary, which the old policy takes equally often."""
    logits = torch.randn(5, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    new, reference = torch.log_softmax(logits, 0), torch.log_softmax(-torch.arange(5, dtype=torch.float64) / 2, 0)
    outputs = made(
        logprobs=new[None],
        old_logprobs=row(*[-math.log(5)] * 5),
        ref_logprobs=reference[None],
        advantages=row(*[0] * 5),
        loss_mask=row(*[1] * 5),
        **{"kl_coef": 1.0, "kl_estimator": estimator, "kl_unbiased": True},
    )
    divergence = (new.exp() * (new - reference)).sum()
    torch.testing.assert_close(outputs.loss, divergence)
    found, wanted = (torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (outputs.loss, divergence))
    torch.testing.assert_close(found, wanted)


def test_the_entropy_bonus_lowers_the_loss_and_raises_entropy() -> None:
    entropy = row(3, 2, 1).requires_grad_()
    outputs = made(entropy=entropy, entropy_coef=0.5)
    outputs.loss.backward()
    assert entropy.grad is not None
    assert float(outputs.loss) == pytest.approx(float(outputs.metrics["pg_loss"]) - 0.5 * 2)
    assert entropy.grad.tolist() == [[pytest.approx(-0.5 / 3)] * 3]


def test_entropy_that_is_only_measured_changes_no_gradient() -> None:
    entropy = row(3, 2, math.nan).requires_grad_()
    outputs = made(logprobs=row(-1, -2, -3).requires_grad_(), loss_mask=row(1, 1, 0), entropy=entropy, log_entropy=True)
    outputs.loss.backward()
    assert entropy.grad is None
    assert float(outputs.metrics["entropy"]) == pytest.approx(2.5)


def test_a_bonus_without_entropy_is_refused() -> None:
    with pytest.raises(ValueError, match=r"entropy_coef is 0\.5 but the batch has no entropy: give it or set it to 0"):
        made(entropy_coef=0.5)


def test_the_effective_sample_size_is_a_mean_of_samples() -> None:
    """Ratios 1, 1 and 2 leave 8/9 of three tokens, and those of the second sample are equal."""
    new = torch.tensor([[0, 0, math.log(2)], [-1, -1, 50]], dtype=torch.float64)
    ones = torch.ones(2, 3)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    outputs = policy_loss("ppo_clip", logprobs=new, old_logprobs=ones * 0, advantages=ones, loss_mask=mask)
    assert float(outputs.metrics["ess_ratio"]) == pytest.approx((0.888889 + 1) / 2, abs=1e-6)


@pytest.mark.parametrize(("aggregation", "wanted"), [("token_mean", 1.8), ("sample_mean", 2.0), ("constant", 0.75)])
def test_samples_of_unequal_length_are_joined_as_said(aggregation: str, wanted: float) -> None:
    nll = torch.tensor([[1.0, 1, 9], [3, 9, 9], [2, 2, 9]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 0]])
    given = {"logprobs": -nll, "old_logprobs": -nll, "advantages": nll, "loss_mask": mask}
    assert float(policy_loss("sft", **given, aggregation=aggregation, max_length=4).loss) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("sapo", {"dual_clip": 3.0}, "'sapo' does not use dual_clip, which is 3.0: .*does: ppo_clip, gspo$"),
        ("policy_gradient", {"clip_high": 0.3}, "clip_high, which is 0.3: leave it empty, .*ppo_clip, gspo, cispo"),
        ("gspo", {"tau_positive": 2.0}, "tau_positive, which is 2.0: leave it at 1.0, .*: sapo"),
        ("sft", {"opsm_delta": 1e-4}, "'sft' does not use opsm_delta"),
        ("ppo_clip", {"max_length": 9}, "aggregation 'sample_mean' does not use max_length, which is 9"),
        ("sapo", {"tau_negative": 0.0}, "tau_negative is 0.0, it must be more than 0"),
    ],
)
def test_what_a_loss_has_no_use_for_is_refused(name: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_loss(name, params)


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_takes_what_a_run_has_by_default(name: str) -> None:
    update = update_params(Parameters.model_validate({"algorithm": {"loss": name}}))
    check_loss(update.loss, update.params)
    assert not wants_entropy(update.params)


def test_a_loss_is_called_with_what_the_sections_say() -> None:
    algorithm = {"loss": "tests.losses_for_tests:squared", "aggregation": "constant", "loss_options": {"beta": 0.5}}
    parameters = Parameters.model_validate({"algorithm": algorithm, "rollout": {"max_new_tokens": 77}})
    update = update_params(parameters)
    assert (update.loss, update.params["max_length"], update.params["beta"]) == (algorithm["loss"], 77, 0.5)


def test_options_are_for_losses_that_are_not_built_in_and_are_further_ones() -> None:
    own = Parameters.model_validate(
        {"algorithm": {"loss": "tests.losses_for_tests:squared", "loss_options": {"clip_low": 1}}}
    )
    with pytest.raises(ValueError, match="algorithm.loss_options has 'clip_low', which every loss is given"):
        update_params(own)
    built_in = Parameters.model_validate({"algorithm": {"loss_options": {"beta": 0.5}}})
    with pytest.raises(
        ValueError, match="'ppo_clip' is built in and takes no algorithm.loss_options: leave 'beta' out"
    ):
        update_params(built_in)
    with pytest.raises(ValueError, match="unknown loss parameter 'dual', did you mean 'dual_clip'"):
        check_loss("ppo_clip", {"dual": 3})
