"""Rewards that look at a response's form, its length, or at nothing: the tables are the specification."""

from collections.abc import Mapping
from typing import Any

import pytest

from tests.reward_tables import short, verdict

T, A = "<think>", "<answer>"
GOOD = "<think>so</think><answer>5</answer>"
FORMAT: list[tuple[str, dict[str, Any], float]] = [
    (GOOD, {}, 1),
    ("<think>so</think>\n<answer>5</answer>", {}, 1),
    (f" \n{GOOD}\n", {}, 1),
    ("<think>a\n\nb</think> <answer>\n5\n</answer>", {}, 1),
    ("<think>a < b</think><answer>5</answer>", {}, 1),
    ("<think><b>so</b></think><answer>5</answer>", {}, 1),
    ("<think>\u5317</think><answer>\u4eac</answer>", {}, 1),
    ("<think>" + "so " * 300_000 + "</think><answer>5</answer>", {}, 1),
    ("so</think><answer>5</answer>", {"opened": True}, 1),
    ("<answer>5</answer>", {"tags": "answer"}, 1),
    ("<a>1</a><b>2</b><c>3</c>", {"tags": "a, b, c"}, 1),
    ("<my-tag>1</my-tag>", {"tags": "my-tag"}, 1),
    ("Answer: 5", {"pattern": r"Answer: \d+"}, 1),
    (" Answer: 5\n", {"pattern": r"Answer: \d+"}, 1),
    ("a\nb", {"pattern": "a.b"}, 1),
    ("", {"pattern": ""}, 0),
    ("", {"pattern": "a?"}, 1),
    ("", {}, 0),
    ("5", {}, 0),
    ("<think>so</think>", {}, 0),
    ("<answer>5</answer>", {}, 0),
    ("<answer>5</answer><think>so</think>", {}, 0),
    (f"x{GOOD}", {}, 0),
    (f"{GOOD}x", {}, 0),
    ("<think>so</think>x<answer>5</answer>", {}, 0),
    ("<think></think><answer>5</answer>", {}, 0),
    ("<think>so</think><answer> \n</answer>", {}, 0),
    ("<think>so<answer>5</answer>", {}, 0),
    ("<think>so</think><answer>5", {}, 0),
    ("<think>so<answer>5</answer></think>", {}, 0),
    ("<think>so<answer>5</think></answer>", {}, 0),
    (GOOD + GOOD, {}, 0),
    ("<think>so</think><answer>5</answer><answer>6</answer>", {}, 0),
    ("<think><think>so</think></think><answer>5</answer>", {}, 0),
    ("</think>so<think><answer>5</answer>", {}, 0),
    ("<Think>so</Think><Answer>5</Answer>", {}, 0),
    ("<think >so</think><answer>5</answer>", {}, 0),
    (GOOD, {"opened": True}, 0),
    ("so<answer>5</answer>", {"opened": True}, 0),
    (GOOD, {"tags": "answer"}, 0),
    ("Answer: five", {"pattern": r"Answer: \d+"}, 0),
    ("Answer: 5 or 6", {"pattern": r"Answer: \d+"}, 0),
    ("<think>" * 100_000, {}, 0),
]
LENGTH: list[tuple[int | None, int, int, float | None]] = [  # tokens, max_tokens, buffer_tokens, score
    *[(tokens, 100, 20, 0.0) for tokens in (0, 1, 50, 79, 80)],
    *[(80 + over, 100, 20, -over / 20) for over in range(1, 21)],
    *[(tokens, 100, 20, -1.0) for tokens in (100, 101, 120, 1000, 10**9)],
    (16384, 20480, 4096, 0.0),
    (18432, 20480, 4096, -0.5),
    (20480, 20480, 4096, -1.0),
    (20481, 20480, 4096, -1.0),
    (0, 10, 0, 0.0),
    (10, 10, 0, 0.0),
    (11, 10, 0, -1.0),
    (0, 10, 10, 0.0),
    (5, 10, 10, -0.5),
    (10, 10, 10, -1.0),
    (1, 1, 1, -1.0),
    (None, 100, 20, None),
]


@pytest.mark.parametrize(("response", "options", "score"), FORMAT, ids=short)
def test_a_response_has_the_form_or_not(response: str, options: Mapping[str, Any], score: float) -> None:
    said = verdict("format", response, None, **options)
    assert said.score == score
    assert bool(said.reason) == (score == 0)


def test_each_tag_is_a_part() -> None:
    said = verdict("format", "<think>so</think>5", None)
    assert (said.parts, said.reason) == ({"think": 1.0, "answer": 0.0}, "<answer> is not there once")


@pytest.mark.parametrize("tags", ["", "think,", "think,think", "a b", "<think>"])
def test_tags_that_are_none_are_refused(tags: str) -> None:
    with pytest.raises(ValueError, match="give different names with commas between them"):
        verdict("format", GOOD, None, tags=tags)


@pytest.mark.parametrize(("tokens", "most", "buffer", "score"), LENGTH)
def test_what_is_too_long_costs_by_its_tokens(tokens: int | None, most: int, buffer: int, score: float | None) -> None:
    said = verdict("length_penalty", "text", None, tokens=tokens, max_tokens=most, buffer_tokens=buffer)
    assert said.score == (None if score is None else pytest.approx(score))


@pytest.mark.parametrize(("most", "buffer"), [(0, 0), (10, 11), (10, -1)])
def test_a_buffer_beyond_the_limit_is_refused(most: int, buffer: int) -> None:
    with pytest.raises(ValueError, match="it must be from 0 to max_tokens"):
        verdict("length_penalty", "text", None, tokens=1, max_tokens=most, buffer_tokens=buffer)


def test_random_is_a_fair_coin() -> None:
    scores = [verdict("random", "", None).score for _ in range(400)]
    assert set(scores) == {0.0, 1.0}
    assert 120 < sum(filter(None, scores)) < 280


# Of the responses 0 to 39 to the prompt "", computed with sha256sum.
COINS = "1011110001010111000100011110110000011001"


@pytest.mark.parametrize("number", range(40))
def test_deterministic_random_depends_on_prompt_response_and_seed_alone(number: int) -> None:
    first, again = (verdict("deterministic_random", str(number), label).score for label in (None, "5"))
    assert first == again == float(COINS[number])


def test_deterministic_random_is_the_coin_of_its_seed() -> None:
    def coins(seed: str) -> list[float | None]:
        return [verdict("deterministic_random", str(number), None, seed=seed).score for number in range(40)]

    assert coins("a") != coins("b")
    assert coins("a") == coins("a")
    assert verdict("deterministic_random", "\ud800", None).score in (0.0, 1.0)
