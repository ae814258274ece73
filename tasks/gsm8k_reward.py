"""The reward of GSM8K: the number after the last `####`."""

import re
from typing import Any

from milepost.tasks.extraction import after_thinking, last_boxed
from milepost.tasks.math_answers import normal_form
from milepost.tasks.numerals import rational, same_number
from milepost.tasks.verdict import Sample, Verdict, ungradable

MAX_ANSWER = 300  # characters
MAX_LINE = 2000

_NUMERAL = r"[-+]?\s?(?:\d+\s)?\d+(?:\.\d*)?(?:e[-+]?\d+|\s?/\s?\d+|\s?\\times\s10\^\{?-?\d+\}?)?\s?%?"
_ONE_NUMBER = re.compile(rf"({_NUMERAL}|[-+]?\s?\\frac\s?\{{\d+\}}\s?\{{\d+\}})(?:[\s/][^\d]*)?", re.IGNORECASE)
_IN_TEXT = re.compile(r"[-\u2212]?(?:\d[\d,]*)?\.?\d+(?:\s?/\s?\d+)?%?")


def gsm8k(sample: Sample, *, flexible: bool = False, boxed_only: bool = False) -> Verdict:
    """1.0 when the number after the last `####` equals the label, or one of a list of labels; otherwise 0.0.

    Words and units may follow the number, a second number may not: `5 or 6` is no answer. With `flexible` a response
    without `####` answers with its last number; with `boxed_only` with what is in its last box, and only with that.
    """
    problem = gsm8k_label_problem(sample.label)
    if problem:
        return ungradable(sample.label, problem)
    answer = _extracted(after_thinking(sample.response), flexible=flexible, boxed_only=boxed_only)
    number = None if answer is None else _number(answer)
    if number is None:
        return Verdict(0.0, reason="no answer", extracted=answer)
    labels = sample.label if isinstance(sample.label, list) else [sample.label]
    right = any(same_number(_number(_marked(label)) or "", number) for label in labels)
    return Verdict(float(right), reason="" if right else "different", extracted=answer)


def gsm8k_label_problem(label: Any, options: Any = None) -> str:
    """Why a label has no number; empty when it is one, a text that ends in `#### n`, or a list of these."""
    labels = label if isinstance(label, list) else [label]
    if not labels or any(_number(_marked(each)) is None for each in labels):
        return "give a number, a text that ends in '#### n', or a list of them"
    return ""


def _marked(label: Any) -> str:
    if isinstance(label, bool) or not isinstance(label, str | int | float):
        return ""
    text = str(label)
    boxed = last_boxed(text)
    return boxed if boxed is not None else text.rpartition("####")[2]


def _extracted(text: str, *, flexible: bool, boxed_only: bool) -> str | None:
    if boxed_only:
        return last_boxed(text)
    _, marker, after = text.rpartition("####")
    if marker:
        return after.strip().partition("\n")[0].strip()[:MAX_LINE]
    numbers = _IN_TEXT.findall(text[-MAX_LINE:]) if flexible else []
    return str(numbers[-1]).rstrip(",") if numbers else None


def _number(text: str) -> str | None:
    """The normal form of the one number that `text` begins with; None when there is none, or more than one."""
    if len(text) > MAX_ANSWER:
        return None
    form = normal_form(text.strip().strip("$"))
    found = _ONE_NUMBER.fullmatch(form)
    number = found.group(1).strip() if found else form
    return number if rational(number) is not None else None
