"""Losses against hand-computed numbers; that no split of a batch changes them is in test_loss_splits.py."""

import math

import pytest
import torch

from milepost.engines.loss_params import check_loss
from milepost.engines.losses import count, kl, policy_loss

NAMES = ["ppo_clip", "gspo", "cispo", "sapo", "policy_gradient", "sft"]
AGGREGATIONS = ["sample_mean", "token_mean", "constant"]


def one_token(ratio: float, advantage: float, name: str = "ppo_clip", **params: object) -> float:
    zero = torch.zeros(1, 1, dtype=torch.float64)
    logprobs = zero + math.log(ratio)
    return float(
        policy_loss(
            name, logprobs=logprobs, old_logprobs=zero, advantages=zero + advantage, loss_mask=zero + 1, **params
        ).loss
    )


def nll(rows: list[list[float]], mask: list[list[int]], **params: object) -> float:
    logprobs = -torch.tensor(rows, dtype=torch.float64)
    zeros = torch.zeros_like(logprobs)
    return float(
        policy_loss(
            "sft", logprobs=logprobs, old_logprobs=zeros, advantages=zeros, loss_mask=torch.tensor(mask), **params
        ).loss
    )


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss"), [(1.5, 1, -1.28), (0.5, 1, -0.5), (1.5, -1, 1.5), (0.5, -1, 0.8)]
)
def test_ppo_clips_only_what_would_be_too_good(ratio: float, advantage: float, loss: float) -> None:
    assert one_token(ratio, advantage, clip_low=0.2, clip_high=0.28) == pytest.approx(loss)


def test_the_dual_clip_bounds_the_loss_of_a_negative_advantage() -> None:
    assert one_token(5, -1) == pytest.approx(5)
    assert one_token(5, -1, dual_clip=3.0) == pytest.approx(3)
    assert one_token(5, 1, dual_clip=3.0) == pytest.approx(-1.2)


def test_cispo_weighs_the_log_probability_with_a_clipped_constant() -> None:
    logprobs = torch.tensor([[math.log(1.5), math.log(0.5)]], requires_grad=True)
    ones = torch.ones(1, 2)
    outputs = policy_loss(
        "cispo", logprobs=logprobs, old_logprobs=ones * 0, advantages=ones, loss_mask=ones, aggregation="token_mean"
    )
    outputs.loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[pytest.approx(-0.6), pytest.approx(-0.4)]]


def test_sapo_is_a_sigmoid_around_ratio_one() -> None:
    gate = 4 / (1 + math.exp(-0.5))
    assert one_token(1.5, 1, "sapo") == pytest.approx(-gate)
    negative = 4 / 1.05 / (1 + math.exp(-1.05 * 0.5))
    assert one_token(1.5, -1, "sapo") == pytest.approx(negative)


def test_gspo_gives_every_token_the_mean_ratio_of_its_sequence() -> None:
    outputs = policy_loss(
        "gspo",
        logprobs=torch.tensor([[-0.5, -1.7, math.nan]]),
        old_logprobs=torch.tensor([[-1.0, -2.0, 0.0]]),
        advantages=-torch.ones(1, 3),
        loss_mask=torch.tensor([[1, 1, 0]]),
    )
    assert float(outputs.loss) == pytest.approx(1.491825, abs=1e-6)


@pytest.mark.parametrize(("aggregation", "loss"), [("token_mean", 0.25), ("constant", 0.125), ("sample_mean", 0.5)])
def test_each_aggregation_has_its_denominator(aggregation: str, loss: float) -> None:
    rows, mask = [[1.0, 9, 9], [0.0, 0, 0]], [[1, 0, 0], [1, 1, 1]]
    assert nll(rows, mask, aggregation=aggregation, max_length=4) == pytest.approx(loss)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_masked_position_reaches_neither_loss_nor_gradient(name: str, bad: float) -> None:
    logprobs = torch.tensor([[-1.0, bad], [bad, bad]], requires_grad=True)
    other = torch.tensor([[-1.5, bad], [bad, bad]])
    mask = torch.tensor([[1, 0], [0, 0]])
    outputs = policy_loss(
        name, logprobs=logprobs, old_logprobs=other, advantages=other, loss_mask=mask, ref_logprobs=other, kl_coef=1.0
    )
    outputs.loss.backward()
    assert logprobs.grad is not None
    assert torch.isfinite(outputs.loss) and all(torch.isfinite(value) for value in outputs.metrics.values())
    assert logprobs.grad.isfinite().all() and logprobs.grad[mask == 0].eq(0).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_batch_without_a_trained_token_has_loss_and_gradient_zero(name: str, aggregation: str) -> None:
    logprobs = torch.zeros(2, 3, requires_grad=True)
    ones = torch.ones(2, 3)
    outputs = policy_loss(
        name,
        logprobs=logprobs,
        old_logprobs=ones,
        advantages=ones,
        loss_mask=ones * 0,
        aggregation=aggregation,
        max_length=3,
    )
    outputs.loss.backward()
    assert logprobs.grad is not None
    assert outputs.loss.item() == 0.0 and logprobs.grad.eq(0).all()


def test_a_trained_nan_stays_visible() -> None:
    nan = torch.full((1, 1), math.nan)
    ones = torch.ones(1, 1)
    assert policy_loss("ppo_clip", logprobs=nan, old_logprobs=ones, advantages=ones, loss_mask=ones).loss.isnan()


def test_extreme_ratios_are_finite() -> None:
    big = torch.tensor([[1e4, -1e4]], requires_grad=True)
    ones = torch.ones(1, 2)
    loss = policy_loss("ppo_clip", logprobs=big, old_logprobs=ones, advantages=-ones, loss_mask=ones).loss
    loss.backward()
    assert big.grad is not None
    assert loss.isfinite() and big.grad.isfinite().all()


def test_half_precision_is_computed_in_float32() -> None:
    half = torch.tensor([[-1.0, -2.0]], dtype=torch.bfloat16)
    outputs = policy_loss("ppo_clip", logprobs=half, old_logprobs=half, advantages=half, loss_mask=half)
    assert outputs.loss.dtype == torch.float32


@pytest.mark.parametrize(
    ("estimator", "difference", "value"),
    [
        ("k1", 0.5, 0.5),
        ("k2", 0.5, 0.125),
        ("k3", 0.5, 0.106531),
        ("k3", -0.5, 0.148721),
        ("k3", 2.0, 1.135335),
        ("k3", -5.0, 142.413159),
        ("low_var", -5.0, 10.0),
        ("low_var", 0.5, 0.106531),
        ("low_var", 0.0, 0.0),
    ],
)
def test_divergence_estimates(estimator: str, difference: float, value: float) -> None:
    estimate = kl(estimator, torch.tensor([difference - 1.5]), torch.tensor([-1.5]))
    assert float(estimate) == pytest.approx(value, abs=1e-5)


def test_descending_the_reference_penalty_moves_towards_the_reference() -> None:
    logprobs = torch.tensor([[-1.0]], requires_grad=True)
    ones = torch.ones(1, 1)
    outputs = policy_loss(
        "ppo_clip",
        logprobs=logprobs,
        old_logprobs=-ones,
        advantages=ones * 0,
        loss_mask=ones,
        ref_logprobs=-1.5 * ones,
        kl_coef=1.0,
    )
    outputs.loss.backward()
    assert logprobs.grad is not None and float(logprobs.grad) > 0


def test_metrics_are_token_means() -> None:
    logprobs = torch.tensor([[math.log(1.5), 0.0, 0.0, 0.0]])
    ones = torch.ones(1, 4)
    metrics = policy_loss("ppo_clip", logprobs=logprobs, old_logprobs=ones * 0, advantages=ones, loss_mask=ones).metrics
    assert float(metrics["pg_clipfrac"]) == pytest.approx(0.25)
    assert float(metrics["ratio_mean"]) == pytest.approx(1.125)
    assert float(metrics["ppo_kl"]) == pytest.approx(-math.log(1.5) / 4)


def test_denominators_count_samples_that_train_something() -> None:
    assert count([[1, 0, 1], [0, 0], [], [1]]) == count(torch.tensor([[1, 0, 1], [0, 0, 0], [0, 0, 0], [1, 0, 0]]))
    assert (count([[1, 0, 1], []]).samples, count([[1, 0, 1], []]).tokens) == (1.0, 2.0)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"clip_hihg": 0.3}, "did you mean 'clip_high'"),
        ({"aggregation": "mean"}, "it must be one of sample_mean, token_mean, constant"),
        ({"aggregation": "constant"}, "divides by max_length, which is None"),
        ({"clip_low": -0.1}, "clip_low is -0.1"),
        ({"dual_clip": 1.0}, "dual_clip is 1.0, it must be more than 1"),
        ({"kl_coef": 0.1}, "the batch has no ref_logprobs"),
    ],
)
def test_a_bad_parameter_is_refused_with_its_value(params: dict[str, object], message: str) -> None:
    ones = torch.ones(1, 1)
    with pytest.raises(ValueError, match=message):
        policy_loss("ppo_clip", logprobs=ones, old_logprobs=ones, advantages=ones, loss_mask=ones, **params)


def test_shapes_must_agree() -> None:
    ones = torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"advantages has shape \(2,\), loss_mask \(2, 3\)"):
        policy_loss("ppo_clip", logprobs=ones, old_logprobs=ones, advantages=torch.ones(2), loss_mask=ones)


def test_unknown_names_are_refused_with_the_nearest() -> None:
    with pytest.raises(LookupError, match="did you mean 'ppo_clip'"):
        check_loss("ppo_clp")
    with pytest.raises(ValueError, match="must take 2 arguments"):
        check_loss("math:sqrt")
    with pytest.raises(LookupError, match="unknown KL estimator 'k4'"):
        kl("k4", torch.ones(1), torch.ones(1))


def test_supervised_learning_says_nothing_of_an_old_policy() -> None:
    logprobs = torch.tensor([[-1.0, -2.0]])
    zeros, mask = torch.zeros(1, 2), torch.ones(1, 2)
    outputs = policy_loss("sft", logprobs=logprobs, old_logprobs=zeros, advantages=zeros, loss_mask=mask)
    assert {name: float(value) for name, value in outputs.metrics.items()} == {"pg_loss": 1.5, "nll": 1.5}


def raises(inputs: object, params: object) -> None:
    raise KeyError("no such thing")


def returns_a_number(inputs: object, params: object) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("loss", "problem"),
    [("raises", "raised KeyError: 'no such thing'"), ("returns_a_number", "returned 1.0, expected LossOutputs")],
)
def test_a_loss_of_somebody_else_is_named_with_what_is_wrong_with_it(loss: str, problem: str) -> None:
    with pytest.raises(RuntimeError, match=f"algorithm.loss 'tests.test_losses:{loss}' {problem}"):
        one_token(1.0, 1.0, f"tests.test_losses:{loss}")
