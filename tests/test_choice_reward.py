"""Multiple choice on what models write: the table is the specification."""

from typing import Any

import pytest

from tests.reward_tables import short, verdict

COLOURS = {"choices": ["red", "green", "blue"]}
TABLE: list[tuple[str, Any, float | None, dict[str, Any]]] = [
    ("C", "C", 1, {}),
    ("(C)", "C", 1, {}),
    ("C)", "C", 1, {}),
    ("C.", "C", 1, {}),
    ("c", "C", 1, {}),
    ("b) green", "B", 1, {}),
    ("Answer: C", "C", 1, {}),
    ("answer: c", "C", 1, {}),
    ("Answer\n\nC", "C", 1, {}),
    ("The answer is (C).", "C", 1, {}),
    ("**Answer: C**", "C", 1, {}),
    ("Answer: [C]", "C", 1, {}),
    ("Final answer: **C. Paris**", "C", 1, {}),
    ("the correct option is: D", "D", 1, {}),
    ("The best choice is D", "D", 1, {}),
    ("\\boxed{C}", "C", 1, {}),
    ("\\boxed{c}", "C", 1, {}),
    ("\\boxed{\\text{C}}", "C", 1, {}),
    ("\\boxed{\\textbf{(C)}}", "C", 1, {}),
    ("A is tempting, but \\boxed{B} and B only. Not C", "B", 1, {}),
    ("$C$", "C", 1, {}),
    ("\uff23", "C", 1, {}),
    ("The answer depends on B. So C", "C", 1, {}),
    ("the answer is a good one. B", "B", 1, {}),
    ("The answer is A because it fits", "A", 1, {}),
    ("The answer is C. Option A fails here.", "C", 1, {}),
    ("The answer is not B, it is C", "C", 1, {}),
    ("C is correct, while A is wrong", "C", 1, {}),
    ("Option A is wrong. Option C is right.", "C", 1, {}),
    ("Not A. B", "B", 1, {}),
    ("I think D", "D", 1, {}),
    ("<think>The answer is A</think>B", "B", 1, {}),
    ("A.\nB.\nC.\nD.\nThe answer: D.", "D", 1, {}),
    ("C", 2, 1, {}),
    ("C", "(c)", 1, {}),
    ("C", "C. blue", 1, {}),
    ("C", "\\boxed{C}", 1, {}),
    ("K", "K", 1, {"valid_letters": "ABCDEFGHIJK"}),
    ("B", "A", 1, {"correct_letter": "B"}),
    ("green", "B", 1, COLOURS),
    ("So it is:\nGreen.", "B", 1, COLOURS),
    ("\\boxed{green}", "green", 1, COLOURS),
    ("B", "green", 1, COLOURS),
    ("B", "B", 1, {"choices": {"B": "green", "A": "red"}}),
    ("D", "C", 0, {}),
    ("A or B", "A", 0, {}),
    ("A or B", "B", 0, {}),
    ("I think it's B or C", "C", 0, {}),
    ("B is correct, while C or D would be tempting", "B", 1, {}),
    ("Of A, B and C I take C", "C", 1, {}),
    ("Answer: A and B", "A", 0, {}),
    ("Answer: A, B", "B", 0, {}),
    ("\\boxed{A, B}", "B", 0, {}),
    ("It is not B", "B", 0, {}),
    ("A good idea", "A", 0, {}),
    ("Answer: Carbon", "C", 0, {}),
    ("ABC", "C", 0, {}),
    ("\\boxed{}", "C", 0, {}),
    ("", "C", 0, {}),
    (" \n ", "C", 0, {}),
    ("C " * 500_000 + "D", "C", 0, {}),
    ("D", "A", 0, COLOURS),
    ("K", "K", None, {}),
    ("C", True, None, {}),
    ("C", None, None, {}),
    ("C", "", None, {}),
    ("C", 30, None, {}),
    ("C", -1, None, {}),
    ("C", ["C"], None, {}),
    ("D", "D", None, COLOURS),
    ("A", "yellow", None, COLOURS),
]


@pytest.mark.parametrize(("response", "label", "score", "metadata"), TABLE, ids=short)
def test_a_response_settles_on_a_letter(
    response: str, label: Any, score: float | None, metadata: dict[str, Any]
) -> None:
    assert verdict("multiple_choice", response, label, metadata).score == score
    assert verdict("gpqa", response, label, metadata).score == score


def test_more_letters_are_an_option() -> None:
    assert verdict("multiple_choice", "Answer: K", "K", letters="ABCDEFGHIJK").extracted == "K"
