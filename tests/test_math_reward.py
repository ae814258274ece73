"""The math reward on what models write: the table is the specification."""

import pytest

from milepost.tasks.math_answers import extract_answer
from milepost.tasks.math_reward import math
from milepost.tasks.verdict import Sample

RIGHT = [
    (r"\boxed{5}", "5"),
    (r"\boxed{5}", 5),
    (r"\boxed 5", "5"),
    (r"\boxed5", 5.0),
    (r"so \boxed{3}, no, \boxed{4}", "4"),
    (r"\boxed{4} and then \boxed{5", "4"),
    (r"\fbox{12}", "12"),
    (r"<think>\boxed{1}</think> It is \boxed{2}.", "2"),
    ("\\boxed{\u22123}", "-3"),
    ("\\boxed{\uff11\uff12}", "12"),
    ("\\boxed{\u0661\u0662}", "12"),
    ("\\boxed{x\u00b2}", "x^2"),
    ("\\boxed{2\u03c0}", r"2\pi"),
    (r"\boxed{\dfrac{2}{4}}", r"\frac{1}{2}"),
    (r"\boxed{0.5}", r"\frac12"),
    (r"\boxed{.5}", "1/2"),
    (r"\boxed{2^{10}}", "1024"),
    (r"\boxed{2**10}", "1024"),
    (r"\boxed{3\times10^{5}}", "300000"),
    ("\\boxed{3e5}", "300000"),
    (r"\boxed{50\%}", "50"),
    (r"\boxed{50\%}", "0.5"),
    (r"\boxed{1,000}", "1000"),
    (r"\boxed{1{,}000{,}000}", "1000000"),
    (r"\boxed{1\,000}", "1 000"),
    (r"\boxed{5.0}", "5"),
    (r"\boxed{007}", "7"),
    (r"\boxed{1\frac{1}{2}}", "1.5"),
    (r"\boxed{1 1/2}", "3/2"),
    (r"\boxed{x=5}", "5"),
    ("\\boxed{5}", "x = 5"),
    (r"\boxed{5\text{ cm}}", "5"),
    (r"\boxed{5 \text{ cm}}", "5 cm"),
    (r"\boxed{12\text{ apples}}", "12 apple"),
    (r"\boxed{\$5}", "5"),
    (r"\boxed{90^\circ}", "90"),
    (r"\boxed{\text{Tuesday}}", "tuesday"),
    (r"\boxed{\textbf{(A)}}", "A"),
    (r"\boxed{\{1,2\}}", r"\{2,1\}"),
    (r"\boxed{\left(1,2\right)}", "(1,2)"),
    (r"\boxed{\sqrt{8}}", r"2\sqrt{2}"),
    (r"\boxed{1+x}", "x+1"),
    (r"\boxed{5cm}", "5"),
    (r"\boxed{3 m^2}", "3"),
    (r"\boxed{10\text{ m/s}}", "10 m/s"),
    (r"\boxed{e^{x^2}}", "e^{x^{2}}"),
    (r"\boxed{(x^2)^3}", "x^6"),
    (r"\boxed{(x+1)^2}", "x^2+2x+1"),
    (r"\boxed{\sin x}", r"\sin(x)"),
    (r"\boxed{0.333333}", r"\frac{1}{3}"),
    (r"\boxed{10!}", "3628800"),
    (r"\boxed{2^{2^{100}}}", "2^{2^{100}}"),
    ("**Answer:** 5", "5"),
    ("Answer: 0.5", "0.5"),
    ("The answer is 72.", "72"),
    ("The final answer is $x = \\frac{3}{4}$.", "0.75"),
    ("reasoning\n#### 72", "72"),
    ("7", "reasoning\n#### 7"),
    ("12+7=19", "19"),
    ("The answer is therefore 42.", "42"),
    ("The answer is: **42**", "42"),
    ("Answer: \\(42\\)", "42"),
    ("Total: 42", "42"),
    (r"\boxed{1 234 567}", "1234567"),
    (r"\boxed{2,1}", "1, 2"),
    ("6 * 7 => 42", "42"),
    ("x <= 5", r"x \le 5"),
    ("Room 5", "room 5"),
    ("19", r"\boxed{19}"),
    ("So they have 42 apples in total.", "42"),
    ("It is a Tuesday\nTuesday", "Tuesday"),
    (r"\boxed{6}", ["5", "6"]),
    (r"\boxed{-\frac{1}{2}}", -0.5),
    (r"\boxed{[0,1)}", "[0, 1)"),
    (r"\boxed{\emptyset}", "\u2205"),
]
WRONG = [
    (r"\boxed{day}", "week"),
    (r"\boxed{dog}", "god"),
    (r"\boxed{no}", "on"),
    (r"\boxed{}", "5"),
    (r"\boxed{\text{}}", r"day"),
    (r"\boxed{\$}", "5"),
    ("", "5"),
    ("no idea", "5"),
    ("Answer: 5", "5.7"),
    ("Answer: 5", "1/2"),
    ("Answer: 5", "abc"),
    (r"\boxed{5}", "1e400"),
    (r"\boxed{12}", "1,2"),
    (r"\boxed{0.33}", r"\frac{1}{3}"),
    (r"\boxed{6.9999999}", "7"),
    (r"\boxed{5 \text{ cm}}", "5 m"),
    (r"\boxed{(2,1)}", "(1,2)"),
    (r"\boxed{[0,1)}", "(0,1)"),
    (r"\boxed{3.14}", r"\pi"),
    (r"\boxed{-3}", "3"),
    (r"\boxed{x+2}", "x+1"),
    (r"\boxed{yes}", "no"),
    (r"\boxed{1/0}", "5"),
    (r"<think>\boxed{5}</think> I do not know.", "5"),
    (r"\boxed{9**9**9**9}", "5.5"),
    (r"\boxed{9^{9^{9^9}}}", "5.5"),
    (r"\boxed{(999999)!}", "5.5"),
    (r"\boxed{" + "(" * 5000 + "5" + ")" * 5000 + "}", "5"),
    (r"\boxed{9^{99999999}}", "5"),
    (r"\boxed{__import__('os').system('true')}", "0"),
    (r"\boxed{" + "9" * 10000 + "}", "9"),
    (r"\boxed{\frac{\frac{\frac{}}}}", "5"),
    (r"\boxed{5 or 6}", "5"),
    (r"\boxed{5, 6}", "5"),
    (r"\boxed{5 6}", "56"),
    (r"\boxed{5 6}", "5"),
    (r"\boxed{-2\infty}", r"\frac{1}{2}"),
    (r"\boxed{2ab}", "2"),
    (r"\boxed{2x}", "2"),
    (r"\boxed{2 x}", "2"),
    (r"\boxed{x^{9^{9^9}}}", "x"),
]


def judged(response: str, label: object, **options: object) -> float | None:
    return math(Sample("", response, label, {}), **options).score


@pytest.mark.parametrize(("response", "label"), RIGHT)
def test_an_equal_answer_is_right(response: str, label: object) -> None:
    assert judged(response, label) == 1.0


@pytest.mark.parametrize(("response", "label"), WRONG)
def test_a_different_answer_is_wrong(response: str, label: object) -> None:
    assert judged(response, label) == 0.0


@pytest.mark.parametrize("label", [None, "", True, float("inf"), {"a": 1}, [], ["5", None]])
def test_a_label_that_is_no_answer_cannot_be_scored(label: object) -> None:
    verdict = math(Sample("", r"\boxed{5}", label, {}))
    assert verdict.score is None
    assert "is not an answer" in verdict.reason


def test_options_demand_a_format() -> None:
    assert judged("5", "5", boxed_only=True) == 0.0
    assert math(Sample("", r"\boxed{5}", "5", {}), require="</think>").reason == "format"
    assert judged(r"<think>hm</think>\boxed{5}", "5", boxed_only=True, require="</think>") == 1.0


def test_what_was_compared_is_in_the_verdict() -> None:
    assert math(Sample("", r"so \boxed{\frac{1}{2}}", "1", {})).extracted == r"\frac{1}{2}"
    assert extract_answer(r"\boxed{\text{a}\}b}") == r"\text{a}\}b"
