import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from milepost.engines.embedded_batch import fill_holes
from milepost.engines.embedded_request import Limits, SamplingParams, parse_generate, parse_sampling
from milepost.engines.sampling import draw, gumbel_noise, sampling_rows, vocabulary_columns

LIMITS = Limits(vocab_size=10, context_length=8, encode=lambda text: [ord(c) - 97 for c in text])


def draw_rows(
    logits: torch.Tensor, params: list[SamplingParams], positions: list[int]
) -> tuple[list[int], list[float]]:
    rows = sampling_rows(params, vocabulary_columns(logits.shape[1]), stop_ids=[[0]] * len(params))
    tokens, logprobs = draw(logits, rows, torch.tensor(positions))
    return tokens.tolist(), logprobs.tolist()


def shares(logits: list[float], params: dict[str, float], draws: int = 20_000) -> list[float]:
    """How often each token is drawn with seeds 0, 1, 2, ..."""
    rows = [SamplingParams(sampling_seed=seed, **params) for seed in range(draws)]  # type: ignore[arg-type]
    tokens, _ = draw_rows(torch.tensor([logits]).repeat(draws, 1), rows, [0] * draws)
    return (np.bincount(tokens, minlength=len(logits)) / draws).tolist()


def test_tokens_are_drawn_with_the_probabilities_of_the_tempered_softmax() -> None:
    wanted = torch.softmax(torch.tensor([1.0, 0.0, -2.0]) / 2, 0).tolist()
    assert shares([1.0, 0.0, -2.0], {"temperature": 2.0}) == pytest.approx(wanted, abs=0.015)


def test_the_noise_of_a_row_is_fresh_at_each_position() -> None:
    params = [SamplingParams(sampling_seed=7)] * 20_000
    tokens, _ = draw_rows(torch.zeros(20_000, 4), params, list(range(20_000)))
    assert (np.bincount(tokens, minlength=4) / 20_000).tolist() == pytest.approx([0.25] * 4, abs=0.015)
    pairs = np.bincount(np.array(tokens[:-1]) * 4 + np.array(tokens[1:]), minlength=16) / 19_999
    assert pairs.tolist() == pytest.approx([1 / 16] * 16, abs=0.01)


def test_noise_is_gumbel_and_never_infinite() -> None:
    noise = gumbel_noise(np.arange(500, dtype=np.uint64), np.zeros(500, dtype=np.int64), vocabulary_columns(2000))
    assert bool(noise.isfinite().all())
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.01)
    assert noise.std().item() == pytest.approx(math.pi / math.sqrt(6), abs=0.01)


@given(st.integers(0, 2**63 - 1), st.integers(0, 10_000), st.integers(1, 6))
def test_a_row_draws_the_same_token_whatever_else_is_in_the_batch(seed: int, position: int, others: int) -> None:
    logits = torch.randn(others + 1, 50, generator=torch.Generator().manual_seed(seed % 1000))
    alone, _ = draw_rows(logits[-1:], [SamplingParams(sampling_seed=seed)], [position])
    params = [SamplingParams(temperature=0.0)] * others + [SamplingParams(sampling_seed=seed)]
    together, _ = draw_rows(logits, params, [3] * others + [position])
    assert together[-1] == alone[0]


def test_log_probabilities_are_of_the_full_distribution_at_the_temperature() -> None:
    # softmax([ln 4, ln 1] / 2) = [2/3, 1/3]; the truncation to one token does not enter.
    logits = torch.tensor([[math.log(4.0), 0.0]])
    tokens, logprobs = draw_rows(logits, [SamplingParams(temperature=2.0, top_k=1)], [0])
    assert tokens == [0]
    assert logprobs == pytest.approx([math.log(2 / 3)])


def test_temperature_zero_takes_the_likeliest_token_with_its_untempered_log_probability() -> None:
    tokens, logprobs = draw_rows(torch.tensor([[0.0, math.log(3.0)]]), [SamplingParams(temperature=0.0)], [0])
    assert tokens == [1]
    assert logprobs == pytest.approx([math.log(0.75)])


def test_top_k_and_top_p_exclude_the_tail_and_keep_the_proportions() -> None:
    logits = [math.log(0.5), math.log(0.25), math.log(0.15), math.log(0.1)]
    assert shares(logits, {"top_k": 2}) == pytest.approx([2 / 3, 1 / 3, 0, 0], abs=0.015)
    assert shares(logits, {"top_p": 0.6}) == pytest.approx([2 / 3, 1 / 3, 0, 0], abs=0.015)
    assert shares(logits, {"top_p": 0.01})[0] == 1.0


def test_stop_tokens_are_not_drawn_before_min_new_tokens() -> None:
    logits = torch.tensor([[5.0, 0.0], [5.0, 0.0]])
    tokens, _ = draw_rows(logits, [SamplingParams(temperature=0.0, min_new_tokens=2)] * 2, [1, 2])
    assert tokens == [1, 0]


@pytest.mark.parametrize(
    ("given_params", "message"),
    [
        ({"temprature": 1}, "unknown sampling parameter 'temprature', did you mean 'temperature'"),
        ({"temperature": -1}, "temperature is -1, expected a number of at least 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": True}, "temperature is True"),
        ({"top_p": 0}, r"top_p is 0, expected a number in \(0, 1\]"),
        ({"top_k": 0}, "top_k is 0, expected a positive integer, or -1"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0, expected a positive integer"),
        ({"min_new_tokens": 3, "max_new_tokens": 2}, "min_new_tokens is 3, expected at most max_new_tokens"),
        ({"stop": [""]}, "stop is .*, expected a non-empty string"),
        ({"sampling_seed": 2**63}, "sampling_seed is .*, expected an integer from 0"),
        ({"n": 2}, "n=2 is not supported"),
        ({"frequency_penalty": 0.5}, "frequency_penalty=0.5 is not supported"),
        ([1], "expected an object"),
    ],
)
def test_a_bad_sampling_parameter_is_refused_with_its_value(given_params: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_sampling(given_params)


def test_parameters_at_their_neutral_value_are_accepted() -> None:
    params = parse_sampling({"n": 1, "repetition_penalty": 1.0, "stop": None, "max_new_tokens": None, "top_k": None})
    assert (params.max_new_tokens, params.stop, params.top_k) == (None, (), -1)


def test_a_request_without_a_seed_gets_a_fresh_one() -> None:
    assert parse_sampling({}).sampling_seed != parse_sampling({}).sampling_seed


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ([], "not a JSON object"),
        ({}, "either text or input_ids"),
        ({"text": "a", "input_ids": [1]}, "either text or input_ids"),
        ({"input_ids": []}, "the prompt is empty"),
        ({"text": ""}, "the prompt is empty"),
        ({"text": []}, "list of prompts is empty"),
        ({"text": 5}, "text is 5"),
        ({"input_ids": [1, "a"]}, "not a list of token ids"),
        ({"input_ids": [[1], 2]}, "not a list of token ids"),
        ({"input_ids": [10]}, "token id 10 is outside the vocabulary of 10"),
        ({"input_ids": [-1]}, "token id -1 is outside"),
        ({"input_ids": [1] * 8}, "the prompt has 8 tokens"),
        ({"input_ids": [1], "samplingparams": {}}, "unknown field 'samplingparams', did you mean 'sampling_params'"),
        ({"input_ids": [1], "top_logprobs_num": 2}, "top_logprobs_num=2 is not supported"),
        ({"input_ids": [[1], [2]], "sampling_params": [{}]}, "sampling_params has 1 entries for 2 prompts"),
        ({"input_ids": [1], "sampling_params": {"stop_token_ids": [99]}}, "stop token id 99 is outside"),
        ({"input_ids": [1], "rid": 5}, "rid is 5"),
    ],
)
def test_a_bad_generate_body_is_refused_in_one_sentence(body: object, message: str) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        parse_generate(body, LIMITS)
    assert "\n" not in str(refused.value)


def test_a_list_of_prompts_is_a_batch_with_parameters_for_each() -> None:
    call = parse_generate({"text": ["ab", "c"], "rid": "r", "sampling_params": [{"top_k": 1}, {"top_k": 2}]}, LIMITS)
    assert call.is_batch
    assert [(r.rid, r.input_ids, r.params.top_k) for r in call.requests] == [("r_0", (0, 1), 1), ("r_1", (2,), 2)]


@given(st.integers(1, 20).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1)))))
def test_rows_that_remain_stay_dense_and_move_only_into_places_left_free(case: tuple[int, set[int]]) -> None:
    count, leaving = case
    order = fill_holes(sorted(leaving), count)
    assert sorted(order) == sorted(set(range(count)) - leaving)
    assert all(source == row or row in leaving for row, source in enumerate(order))
