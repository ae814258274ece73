"""The rewards that compare numbers as `math` does, but look for them elsewhere: the tables are the specification."""

import pytest

from milepost.tasks.rewards import label_problem
from tests.reward_tables import short, verdict

DAPO = [
    ("Answer: 5", "5", 1),
    ("**Answer:** 5", "5", 1),
    ("**Answer: 5**", "5", 1),
    ("ANSWER: 5.", "5", 1),
    ("answer : 5", 5, 1),
    ("Answer:\n5", "5", 1),
    ("Answer: $5$", "5", 1),
    ("Answer: $\\boxed{34}$", "34", 1),
    ("Answer: \\boxed{34}.", "34", 1),
    ("Answer: x = 7", "7", 1),
    ("Answer: $x = y = 7$", "7", 1),
    ("Answer: 3\nno, Answer: 4", "4", 1),
    ("Answer: 4\nno, Answer: 3", "4", -1),
    ("Answer: 4, no, answer: 3", "3", 1),
    ("Answer: 4, no, answer: 3", "4", -1),
    ("Answer: 0.5", "0.5", 1),
    ("Answer: 0.5", "1/2", 1),
    ("Answer: \\frac{1}{2}", "0.5", 1),
    ("Answer: \\dfrac12", 0.5, 1),
    ("Answer: 1,000", "1000", 1),
    ("Answer: 1000", "1,000", 1),
    ("Answer: 3e5", "300000", 1),
    ("Answer: 3\\times10^{5}", "300000", 1),
    ("Answer: 2^{10}", "1024", 1),
    ("Answer: \u22123", "-3", 1),
    ("Answer: \uff11\uff12", "12", 1),
    ("Answer: 50\\%", "50", 1),
    ("Answer: 5 square meters", "5", 1),
    ("Answer: $12", "12", 1),
    ("Answer: 12 dollars", "12", 1),
    ("Answer: 3\\sqrt{2}", "\\sqrt{18}", 1),
    ("Answer: \\frac{\\pi}{2}", "\\pi/2", 1),
    ("Answer: 6", ["5", "6"], 1),
    ("<think>Answer: 5</think>Answer: 6", "6", 1),
    ("Answer: 5", "5.7", -1),
    ("Answer: 5", "1/2", -1),
    ("Answer: 5", "-5", -1),
    ("Answer: 5 or 6", "5", -1),
    ("Answer: five", "5", -1),
    ("Answer:", "5", -1),
    ("Answer: \\text{}", "5", -1),
    ("5", "5", -1),
    ("\\boxed{5}", "5", -1),
    ("", "5", -1),
    ("Answer: 5" + " " * 400, "5", -1),
    ("Answer: 9**9**9**9", "5", -1),
    ("Answer: 5", "abc", None),
    ("Answer: 5", "x+1", None),
    ("Answer: 5", "", None),
    ("Answer: 5", None, None),
    ("Answer: 5", True, None),
    ("Answer: 5", "1e400", None),
    ("Answer: 5", float("nan"), None),
    ("Answer: 5", [], None),
    ("Answer: 5", ["5", "six"], None),
]
DEEPSCALER = [
    ("<think>x</think>\\boxed{5}", "5", 1),
    ("<think>\\boxed{4}</think>\\boxed{5}", "5", 1),
    ("x</think>\\boxed{5}", 5, 1),
    ("x</think>\\boxed{5}", 5.0, 1),
    ("</think>\\boxed 5", "5", 1),
    ("</think>\\fbox{5}", "5", 1),
    ("</think>a</think>\\boxed{5}", "5", 1),
    ("</think>\\boxed{3} no \\boxed{5}", "5", 1),
    ("</think>\\boxed{5} and \\boxed{6", "5", 1),
    ("###Response \\boxed{5}", "5", 1),
    ("x ###Response\n\\boxed{5}", "5", 1),
    ("</thinking>\\boxed{5}", "5", 1),
    ("[/THINK]\\boxed{5}", "5", 1),
    ("<|channel|>final<|message|>\\boxed{5}", "5", 1),
    ("</think>\\boxed{6}", ["5", "6"], 1),
    ("</think>\\boxed{\\frac12}", "\\boxed{0.5}", 1),
    ("</think>\\boxed{\\dfrac{2}{4}}", "1/2", 1),
    ("</think>\\boxed{\\{1,2\\}}", "\\{2,1\\}", 1),
    ("</think>\\boxed{(1,2]}", "(1, 2]", 1),
    ("</think>\\boxed{50\\%}", "0.5", 1),
    ("</think>\\boxed{5\\text{ cm}}", "5", 1),
    ("</think>\\boxed{3e5}", "300000", 1),
    ("</think>\\boxed{\u22123}", "-3", 1),
    ("</think>\\boxed{\\text{Monday}}", "monday", 1),
    ("</think>\\boxed{x^2+2x+1}", "(x+1)^2", 1),
    ("</think>\\boxed{1,024}", "2^{10}", 1),
    ("</think>\\boxed{5}", "#### 5", 1),
    ("\\boxed{5}", "5", 0),
    ("5", "5", 0),
    ("", "5", 0),
    ("</think>5", "5", 0),
    ("</think>The answer is 5", "5", 0),
    ("<think>\\boxed{5}</think>five", "5", 0),
    ("</think>\\boxed{}", "5", 0),
    ("</think>\\boxed{day}", "week", 0),
    ("</think>\\boxed{4}", "5", 0),
    ("</think>\\boxed{(2,1)}", "(1,2)", 0),
    ("</think>\\boxed{9**9**9**9}", "5", 0),
    ("</think>\\boxed{" + "(" * 5000 + "5" + ")" * 5000 + "}", "5", 0),
    ("</think>" + "\\boxed{" * 5000, "5", 0),
    ("</think>\\boxed{5}", None, None),
    ("</think>\\boxed{5}", "", None),
    ("</think>\\boxed{5}", [], None),
    ("</think>\\boxed{5}", False, None),
    ("</think>\\boxed{5}", {"answer": "5"}, None),
]
GSM8K = [
    ("so\n#### 72", "72", 1),
    ("#### 72", 72, 1),
    ("#### 72", 72.0, 1),
    ("#### 72", "reasoning\n#### 72", 1),
    ("####72", "72", 1),
    ("#### 72.", "72", 1),
    ("#### 72.00", "72", 1),
    ("#### **72**", "72", 1),
    ("#### $72", "72", 1),
    ("#### $72.50", "72.5", 1),
    ("#### 1,000", "1000", 1),
    ("#### 1000", "1,000", 1),
    ("#### 1 000", "1000", 1),
    ("#### -3", "-3", 1),
    ("#### \u22123", "-3", 1),
    ("#### \uff17\uff12", "72", 1),
    ("#### +72", "72", 1),
    ("#### 3/4", "0.75", 1),
    ("#### \\frac{3}{4}", "0.75", 1),
    ("#### 1 1/2", "1.5", 1),
    ("#### 3e5", "300000", 1),
    ("#### 50%", "50", 1),
    ("#### 72 apples", "72", 1),
    ("#### 5 m/s", "5", 1),
    ("#### 3\n#### 4", "4", 1),
    ("#### 72\nThat is all.", "72", 1),
    ("<think>#### 3</think>#### 4", "4", 1),
    ("#### 6", ["5", "6"], 1),
    ("#### 5", "\\boxed{5}", 1),
    ("#### 3\n#### 4", "3", 0),
    ("#### 7", "72", 0),
    ("#### 72", "-72", 0),
    ("#### 5 or 6", "5", 0),
    ("#### 2+3=5", "5", 0),
    ("#### 10:30", "10", 0),
    ("#### seventy-two", "72", 0),
    ("####", "72", 0),
    ("#### ", "72", 0),
    ("72", "72", 0),
    ("\\boxed{72}", "72", 0),
    ("", "72", 0),
    ("#### 1/0", "0", 0),
    ("#### " + "9" * 100_000, "9", 0),
    ("#### 9**9**9**9", "9", 0),
    ("#### 72", "seventy-two", None),
    ("#### 72", "", None),
    ("#### 72", None, None),
    ("#### 72", True, None),
    ("#### 72", [], None),
    ("#### 72", "5 or 6", None),
]


@pytest.mark.parametrize(
    ("name", "response", "label", "score"),
    [(name, *row) for name, table in (("dapo", DAPO), ("deepscaler", DEEPSCALER), ("gsm8k", GSM8K)) for row in table],
    ids=short,
)
def test_a_response_and_a_label_have_a_score(name: str, response: str, label: object, score: float | None) -> None:
    said = verdict(name, response, label)
    assert said.score == score
    assert bool(said.reason) == (score != 1)
    assert bool(label_problem(name, label, {})) == (score is None)


def test_dapo_says_accuracy_beside_its_score() -> None:
    assert verdict("dapo", "Answer: 5", "5").parts == {"score": 1.0, "accuracy": 1.0}
    assert verdict("dapo", "Answer: 5", "6").parts == {"score": -1.0, "accuracy": 0.0}
    assert verdict("dapo", "Answer: 5" + " " * 400, "5", tail_characters=1000).score == 1.0


def test_deepscaler_counts_responses_without_an_end_of_thinking() -> None:
    assert verdict("deepscaler", "\\boxed{5}", "5").parts == {"format_miss": 1.0}
    lenient = verdict("deepscaler", "\\boxed{5}", "5", require_thinking=False)
    assert (lenient.score, lenient.parts) == (1.0, {"format_miss": 1.0})
    assert verdict("deepscaler", "</think>5", "5", boxed_only=False).score == 1.0


def test_flexible_gsm8k_takes_the_last_number_where_there_is_no_mark() -> None:
    assert verdict("gsm8k", "3 and 4 are 7 apples.", "7", flexible=True).score == 1.0
    assert verdict("gsm8k", "#### 3\nand then 7", "7", flexible=True).score == 0.0
