"""The rewards for mathematical answers: they differ in where they look for the answer and in what they pay for it."""

import math as arithmetic
import re
import sys
from typing import Any

from milepost.tasks.extraction import THINKING_ENDS, after_thinking, last_boxed
from milepost.tasks.math_answers import extract_answer, normal_form
from milepost.tasks.math_equality import difference
from milepost.tasks.numerals import rational
from milepost.tasks.verdict import Sample, Verdict, ungradable

MAX_ANSWER = 2000  # characters; what is longer equals nothing
LARGEST = sys.float_info.max

_DAPO = re.compile(r"answer\s*[*_]*\s*:[\s*_]*((?:(?!answer\s*[*_]*\s*:)[^\n])*)", re.IGNORECASE)
_LETTER = re.compile(r"[^\W\d_]")
_VALUE = re.compile(r"\d|\\pi")
_CONSTANT = re.compile(r"\\[A-Za-z]+|(?<![A-Za-z])[ei](?![A-Za-z])")


def math(sample: Sample, *, boxed_only: bool = False, require: str = "") -> Verdict:
    """1.0 when the final answer equals the label, or one of a list of labels; otherwise 0.0.

    The answer is in the last box after the thinking; without one (and without `boxed_only`) it is what "the answer is"
    or the last line says. docs/rewards.md has the rules of when two answers are equal. What could take unbounded work
    to evaluate equals only the same text: reason `undecidable`. A response without `require`, such as `</think>`, is
    wrong for its format. A label that is no answer cannot be scored.
    """
    problem = math_label_problem(sample.label)
    if problem:
        return ungradable(sample.label, problem)
    if require and require not in sample.response:
        return Verdict(0.0, reason="format")
    return _judged(sample.label, extract_answer(sample.response, boxed_only=boxed_only))


def deepscaler(sample: Sample, *, boxed_only: bool = True, require_thinking: bool = True) -> Verdict:
    """As `math`, of the box after the thinking, or after `###Response`; 0.0 for a response that has neither.

    The part `format_miss` is 1 for a response without an end of its thinking. It is judged all the same, as a whole,
    with `require_thinking` off. An answer without a box counts with `boxed_only` off.
    """
    problem = math_label_problem(sample.label)
    if problem:
        return ungradable(sample.label, problem)
    response = sample.response
    missed = not any(end in response for end in THINKING_ENDS) and "###Response" not in response
    parts = {"format_miss": float(missed)}
    if missed and require_thinking:
        return Verdict(0.0, parts, reason="format")
    text = after_thinking(response)
    if text == response:
        text = response.partition("###Response")[2] or response
    verdict = _judged(sample.label, extract_answer(text, boxed_only=boxed_only))
    return Verdict(verdict.score, parts, reason=verdict.reason, extracted=verdict.extracted)


def dapo(sample: Sample, *, boxed_only: bool = False, tail_characters: int = 300) -> Verdict:
    """1.0 if the last `Answer:` of the last `tail_characters` is the label, else -1.0; the part `accuracy` is 1 or 0.

    The answer is the rest of its line, or with `boxed_only` the content of the last box; where it has an equals sign,
    the last right side. The label is a number in any form; equal as in `math`.
    """
    problem = dapo_label_problem(sample.label)
    if problem:
        return ungradable(sample.label, problem)
    text = after_thinking(sample.response)
    if boxed_only:
        answer = last_boxed(text)
    else:
        marked = _DAPO.findall(text[-tail_characters:])
        answer = _dapo_answer(marked[-1]) if marked else None
    verdict = _judged(sample.label, answer)
    score = 1.0 if verdict.score else -1.0
    parts = {"score": score, "accuracy": float(verdict.score or 0.0)}
    return Verdict(score, parts, reason=verdict.reason, extracted=verdict.extracted)


def math_label_problem(label: Any, options: Any = None) -> str:
    """Why no answer could be compared with this label; empty when it is a string, a number or a list of them."""
    labels = label if isinstance(label, list) else [label]
    if not labels or None in [_label(each) for each in labels]:
        return "give a string, a number or a list of them"
    return ""


def dapo_label_problem(label: Any, options: Any = None) -> str:
    """Why a label is no number; empty when it is one, such as `5`, `1/2`, `3e5`, `\\frac{\\pi}{2}`."""
    problem = math_label_problem(label)
    if problem:
        return problem
    for each in label if isinstance(label, list) else [label]:
        form = _label(each) or ""
        number = rational(form)
        if number is not None and abs(number) > LARGEST:
            return "it is out of range, give a number below 1.8e308"
        if number is None and (_LETTER.search(_CONSTANT.sub("", form)) or not _VALUE.search(form)):
            return "give a number in any form, or use the reward 'math'"
    return ""


deepscaler_label_problem = math_label_problem


def _judged(label: Any, answer: str | None) -> Verdict:
    """Whether an answer as written equals a label that has no problem."""
    if answer is not None and len(answer) > MAX_ANSWER:
        return Verdict(0.0, reason="undecidable", extracted=answer[:MAX_ANSWER])
    form = "" if answer is None else normal_form(answer)
    if not form:
        return Verdict(0.0, reason="no answer", extracted=answer)
    labels = map(_label, label if isinstance(label, list) else [label])
    reasons = [difference(each, form) for each in labels if each is not None]
    if None in reasons:
        return Verdict(1.0, extracted=answer)
    return Verdict(0.0, reason=str(reasons[0]), extracted=answer)


def _label(label: Any) -> str | None:
    """The normal form of a label, or None when it is not one."""
    if isinstance(label, bool) or not isinstance(label, str | int | float):
        return None
    if isinstance(label, float) and not arithmetic.isfinite(label):
        return None
    text = str(label)
    boxed = last_boxed(text)
    return normal_form(boxed if boxed is not None else text.rpartition("####")[2]) or None


def _dapo_answer(line: str) -> str:
    """What a line says after `Answer:`, without the sentence's end and what is before an equals sign."""
    text = line.strip().strip("*_").strip().removesuffix(".")
    boxed = last_boxed(text)
    return (boxed if boxed is not None else text.strip("$")).rpartition("=")[2].strip()
