"""Text as it stands, and reasoning-gym's own verifiers: the tables are the specification."""

import functools
from typing import Any

import pytest
import reasoning_gym

from milepost.tasks.rewards import label_problem
from tests.reward_tables import short, verdict

EXACT: list[tuple[str, Any, dict[str, Any], float]] = [
    ("yes", "yes", {}, 1),
    (" yes\n", "yes", {}, 1),
    ("yes", " yes\n", {}, 1),
    ("\tyes\u00a0", "yes", {}, 1),
    ("5", 5, {}, 1),
    ("5.0", 5.0, {}, 1),
    ("-5", -5, {}, 1),
    ("b", ["a", "b"], {}, 1),
    ("5", ["a", 5], {}, 1),
    ("", "", {}, 1),
    (" ", "", {}, 1),
    ("a b", "a b", {}, 1),
    ("a\nb", "a\nb", {}, 1),
    ("\u5317\u4eac", "\u5317\u4eac", {}, 1),
    ("\ud800", "\ud800", {}, 1),
    ("\\boxed{5}", "\\boxed{5}", {}, 1),
    ("x" * 1_000_000, "x" * 1_000_000, {}, 1),
    ("Yes", "yes", {"ignore_case": True}, 1),
    ("STRASSE", "stra\u00dfe", {"ignore_case": True}, 1),
    ("B", ["a", "b"], {"ignore_case": True}, 1),
    ("Yes", "yes", {}, 0),
    ("yes.", "yes", {}, 0),
    ("yes", "no", {}, 0),
    ("yes it is", "yes", {}, 0),
    ("5", 5.0, {}, 0),
    ("5.0", 5, {}, 0),
    ("05", 5, {}, 0),
    ("\uff15", 5, {}, 0),
    ("\u22125", -5, {}, 0),
    ("1,000", 1000, {}, 0),
    ("a  b", "a b", {}, 0),
    ("c", ["a", "b"], {}, 0),
    ("a, b", ["a", "b"], {}, 0),
    ("", "yes", {}, 0),
    ("yes", "", {}, 0),
    ("\\boxed{5}", "5", {}, 0),
    ("<think>5</think>5", "5", {}, 0),
    ("caf\u00e9", "cafe\u0301", {}, 0),
    ("I", "\u0131", {"ignore_case": True}, 0),
    ("x" * 1_000_000, "y", {}, 0),
]
REGEX: list[tuple[str, Any, dict[str, Any], float]] = [
    ("ab12", r"[a-z]+\d+", {}, 1),
    (" ab12\n", r"[a-z]+\d+", {}, 1),
    ("a\nb", "a.b", {}, 1),
    ("b", "a|b", {}, 1),
    ("", "a?", {}, 1),
    ("\u5317\u4eac", r"\w+", {}, 1),
    ("\u0665", r"\d", {}, 1),
    ("aXb", "a.b", {}, 1),
    ("2024-01-31", r"\d{4}-\d\d-\d\d", {}, 1),
    ("yes!", "yes!", {}, 1),
    ("a.b", r"a\.b", {}, 1),
    ("aa", r"(a)\1", {}, 1),
    ("x" * 1_000_000, "x+", {}, 1),
    ("the answer is 5", "5", {"search": True}, 1),
    ("ab12", r"\d+", {"search": True}, 1),
    ("line\n5", "^5$", {"search": True, "pattern": "(?m)^5$"}, 1),
    ("YES", "yes", {"ignore_case": True}, 1),
    ("YES", "(?i)yes", {}, 1),
    ("AB", None, {"pattern": "ab", "ignore_case": True}, 1),
    ("AB", "unused", {"pattern": "AB"}, 1),
    ("ab", ["unused"], {"pattern": "ab"}, 1),
    ("ab12 x", r"[a-z]+\d+", {}, 0),
    ("ab", r"[a-z]+\d+", {}, 0),
    ("12ab", r"[a-z]+\d+", {}, 0),
    ("", "a", {}, 0),
    (" ", r"\s", {}, 0),
    ("ab", "a", {}, 0),
    ("ab", "b", {}, 0),
    ("abc", "a|ab", {}, 0),
    ("YES", "yes", {}, 0),
    ("axb", r"a\.b", {}, 0),
    ("ab", r"(a)\1", {}, 0),
    ("the answer is 6", "5", {"search": True}, 0),
    ("line\n5", "^5$", {"search": True}, 0),
    ("", "5", {"search": True}, 0),
    ("AB", "AB", {"pattern": "ab"}, 0),
    ("\uff15", "5", {}, 0),
    ("\u5317", "[a-z]", {}, 0),
    ("x" * 1_000_000, "y+", {"search": True}, 0),
    ("\\boxed{5}", "5", {}, 0),
]
TASKS = [
    "chain_sum",
    "basic_arithmetic",
    "gcd",
    "lcm",
    "leg_counting",
    "prime_factorization",
    "letter_counting",
    "word_sorting",
    "number_sorting",
    "base_conversion",
    "caesar_cipher",
    "countdown",
    "propositional_logic",
    "spell_backward",
    "number_sequence",
]


@pytest.mark.parametrize(("response", "label", "options", "score"), EXACT, ids=short)
def test_exact_compares_text(response: str, label: Any, options: dict[str, Any], score: float) -> None:
    assert verdict("exact", response, label, **options).score == score


@pytest.mark.parametrize(("response", "label", "options", "score"), REGEX, ids=short)
def test_regex_matches_all_or_searches(response: str, label: Any, options: dict[str, Any], score: float) -> None:
    assert verdict("regex", response, label, **options).score == score


@pytest.mark.parametrize("label", [None, True, [], {}, ["a", None]])
def test_a_label_that_is_no_text_is_refused_by_exact(label: Any) -> None:
    assert label_problem("exact", label, {}) == "give a string, a number or a list of them"


@pytest.mark.parametrize(
    ("label", "problem"), [(None, "set the option 'pattern'"), ("(", "it is no regular expression"), (5, "")]
)
def test_a_label_that_is_no_pattern_is_refused_by_regex(label: Any, problem: str) -> None:
    assert problem in label_problem("regex", label, {})
    assert label_problem("regex", label, {"pattern": "a+"}) == ""


@functools.cache
def entry(task: str) -> dict[str, Any]:
    made: dict[str, Any] = next(iter(reasoning_gym.create_dataset(task, size=1, seed=3)))
    return made


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(
    ("form", "right"),
    [
        ("<answer>{}</answer>", True),
        ("<think><answer>no</answer></think>so\n{}\n", True),
        ("<answer>no</answer>{}", False),
    ],
)
def test_a_reasoning_gym_task_judges_its_own_answers(task: str, form: str, right: bool) -> None:
    oracle = entry(task)["answer"] or entry(task)["metadata"]["example_answer"]
    said = verdict("reasoning_gym", form.format(oracle), None, {"dataset": task, "entry": entry(task)})
    assert said.score is not None and (said.score == 1.0) == right


def test_the_entry_of_a_reasoning_gym_sample_is_in_its_metadata_or_is_its_metadata() -> None:
    (right, wrong) = (verdict("reasoning_gym", text, None, entry("gcd")) for text in (entry("gcd")["answer"], "no"))
    assert right.score == 1.0 and wrong.score is not None and wrong.score < 1.0
    with pytest.raises(ValueError, match="add it as 'entry'"):
        verdict("reasoning_gym", "5", None)
    with pytest.raises((ValueError, LookupError), match="did you mean 'chain_sum'"):
        verdict("reasoning_gym", "5", None, {"answer": "5", "metadata": {"source_dataset": "chain_sums"}})
