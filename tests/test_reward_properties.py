"""What holds of rewards whatever a response and a label are."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from milepost.tasks.rewards import label_problem
from tests.reward_tables import verdict

NAMES = ["math", "deepscaler", "dapo", "gsm8k", "f1", "exact_match", "exact", "format", "deterministic_random"]
PIECES = r"\frac{1}{2} \sqrt \text{ } { \left( ^{ 1 23 , ( ) [ ] x = \{ \} and % ! \cup + / \pi ^ e \boxed{ #### $ is"
TEXT = st.one_of(
    st.text(max_size=30),
    st.lists(st.sampled_from([*PIECES.split(), " ", "\n", "answer", "</think>"]), max_size=12).map("".join),
)
PLAIN = st.text(max_size=30).filter(lambda text: not set(text) & set("{}\\#<[") and "answer" not in text.casefold())


@settings(deadline=None, max_examples=150)
@given(TEXT, TEXT)
def test_a_verdict_is_a_finite_number_unless_the_label_has_a_problem(response: str, label: str) -> None:
    for name in NAMES:
        said = verdict(name, response, label)
        assert (said.score is None) == bool(label_problem(name, label, {}))
        assert said.score is None or (math.isfinite(said.score) and -1 <= said.score <= 1)


@settings(deadline=None, max_examples=150)
@given(PLAIN)
def test_an_answer_equals_itself_and_an_empty_one_nothing(text: str) -> None:
    for name in ("math", "boxed_exact_match"):
        if not label_problem(name, text, {}):
            assert verdict(name, rf"\boxed{{{text}}}", text).score == 1.0
        assert verdict(name, r"\boxed{}", text).score in (0.0, None)


@settings(deadline=None, max_examples=150)
@given(st.fractions(max_denominator=1000), st.fractions(max_denominator=1000))
def test_numbers_are_equal_when_they_are_and_in_either_order(a: object, b: object) -> None:
    assert verdict("math", rf"\boxed{{{a}}}", str(b)).score == float(a == b)
    assert verdict("math", rf"\boxed{{{b}}}", str(a)).score == float(a == b)
