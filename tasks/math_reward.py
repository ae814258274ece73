"""The reward for mathematical answers: numerals are compared exactly, words as text, and the rest by math-verify."""

import logging
import math as arithmetic
import re
from dataclasses import replace
from fractions import Fraction
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify

from milepost.tasks.math_answers import extract_answer, last_boxed, normal_form
from milepost.tasks.verdict import Sample, Verdict

MAX_CHARACTERS = 300
MAX_DEPTH = 20
MAX_EXPONENT = 1000
MAX_FACTORIAL = 100

_FUNCTIONS = frozenset(
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log exp sqrt lim max min mod inf".split()
)
_SHORT_UNITS = frozenset("m g s h l n j w v k c f cm mm km kg mg ml ft in yd mi lb oz hr mph".split())
_INTEGER = re.compile(r"[-+]?\s?\d+")
_DECIMAL = re.compile(r"([-+]?)\s?(\d+(?:\.\d*)?)(?:(?:[eE]|\s?(?:\\times|\\cdot|\*)\s?10\^)\{?([-+]?\d+)\}?)?")
_FRACTION = re.compile(
    r"([-+]?)\s?(?:(\d+)\s?/\s?(\d+)|\\frac\s?(?:\{\s?(-?\d+)\s?\}|(\d))\s?(?:\{\s?(\d+)\s?\}|(\d)))"
)
_MIXED = re.compile(r"([-+]?\d+) (\d+)/(\d+)")
_WITH_UNIT = re.compile(r"(.*[\d}])(\s*)([A-Za-z][A-Za-z. /]*)(\^\{?[23]\}?)?")
_WORD = re.compile(r"(?<!\\)(?<![A-Za-z\\])[A-Za-z]{3,}")
_ASSIGNMENT = re.compile(r"[A-Za-z](?:\([a-z]\))?\s?=\s?([^=<>]+)")
_EXPONENT = re.compile(r"\^\s?\{?\(?-?(\d+)")
_TOWER = re.compile(r"\^\s?-?\d+\s?\^")
_FACTORIALS = re.compile(r"(\d+)[)}\s]*!")
# Units are told apart here: math-verify would drop the `ab` of `2ab`.
_LATEX = LatexExtractionConfig(normalization_config=replace(LatexExtractionConfig().normalization_config, units=False))


def math(sample: Sample, *, boxed_only: bool = False, require: str = "") -> Verdict:
    """1.0 when the final answer equals the label, or one of a list of labels; otherwise 0.0.

    Numerals are compared as exact rationals, a decimal and a fraction to six places (0.333333 is 1/3, 0.33 is not);
    `50\\%` equals 50 and 0.5; a list without brackets is a set. A run of three letters is a word, and words are equal
    as text in any case; a unit counts only when answer and label both have one. An empty answer equals nothing.

    What could take unbounded work to evaluate (over 300 characters, 20 nested brackets, powers of numbers as exponents,
    exponents over 1000, factorials over 100) equals only the same text: reason `undecidable`. A response without
    `require`, such as `</think>`, is wrong for its format. A label that is no string, number or list of them cannot be
    scored.
    """
    labels = [_label(label) for label in (sample.label if isinstance(sample.label, list) else [sample.label])]
    if not labels or None in labels:
        return Verdict(
            None, reason=f"label {sample.label!r} is not an answer: give a string, a number or a list of them"
        )
    if require and require not in sample.response:
        return Verdict(0.0, reason="format")
    answer = extract_answer(sample.response, boxed_only=boxed_only)
    if answer is None or not normal_form(answer):
        return Verdict(0.0, reason="no answer", extracted=answer)
    reasons = [_difference(label, normal_form(answer)) for label in labels if label is not None]
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


def _difference(label: str, answer: str) -> str | None:
    """None when the normal forms are equal, else in a word why they are not."""
    if _squeezed(label) == _squeezed(answer):
        return None
    if _unbounded(answer) or _unbounded(label):
        return "undecidable"
    answer, label = _same_side(answer, label), _same_side(label, answer)
    (answer, unit), (label, wanted_unit) = _split_unit(answer), _split_unit(label)
    if unit and wanted_unit and unit != wanted_unit:
        return "unit"
    number, wanted = rational(answer), rational(label)
    if number is not None and number == wanted:
        return None
    if _INTEGER.fullmatch(answer) and _INTEGER.fullmatch(label):
        return "different"
    if _is_text(answer) or _is_text(label):
        return None if _plain(answer) == _plain(label) else "different"
    return None if _verified(label, answer) else "different"


def rational(text: str) -> Fraction | None:
    """The exact value of a numeral (integer, decimal, scientific notation, fraction, mixed number), else None."""
    if found := _MIXED.fullmatch(text):
        whole, top, bottom = map(int, found.groups())
        part = Fraction(top, bottom) if bottom else None
        return None if part is None else (whole - part if text.startswith("-") else whole + part)
    if found := _DECIMAL.fullmatch(text):
        sign, digits, exponent = found.groups()
        if exponent and abs(int(exponent)) > MAX_EXPONENT:
            return None
        return Fraction(f"{sign}{digits}") * Fraction(10) ** int(exponent or 0)
    if found := _FRACTION.fullmatch(text):
        sign, *parts = found.groups()
        top, bottom = (int(part) for part in parts if part)
        return Fraction(-top if sign == "-" else top, bottom) if bottom else None
    return None


def _unbounded(text: str) -> bool:
    """Whether evaluating `text` could take unbounded time or memory, judged without evaluating any of it."""
    if len(text) > MAX_CHARACTERS or text.count("!") > 2:
        return True
    exponents = (int(digits) > MAX_EXPONENT for digits in _EXPONENT.findall(text))
    factorials = (int(digits) > MAX_FACTORIAL for digits in _FACTORIALS.findall(text))
    return any(exponents) or any(factorials) or _deep(text)


def _deep(text: str) -> bool:
    """Whether brackets nest too deep, or a power of a number is an exponent: `e^{x^2}` is fine, `x^{9^9}` is not."""
    inside: list[bool] = []  # of each open bracket: whether it is part of an exponent
    before = ""
    for character in text.replace(" ", ""):
        if character in "([{":
            inside.append(before == "^" or any(inside))
        elif character in ")]}" and inside:
            inside.pop()
        elif character == "^" and any(inside) and not before.isalpha():
            return True
        if len(inside) > MAX_DEPTH:
            return True
        before = character
    return bool(_TOWER.search(text))


def _same_side(text: str, other: str) -> str:
    """The right side of `x = 5` when the other answer is no equation."""
    found = _ASSIGNMENT.fullmatch(text)
    return found.group(1).strip() if found and "=" not in other else text


def _split_unit(text: str) -> tuple[str, str]:
    """A value and its unit, in the singular and lower case; the unit is empty when there is none.

    Words after a number are a unit, but `2x` and `2ab` are products.
    """
    found = _WITH_UNIT.fullmatch(text)
    if not found:
        return text, ""
    value, space, name, power = found.groups("")
    words = [word.strip(".").casefold() for word in re.split(r"[ /]", name) if word]
    short = all(word in _SHORT_UNITS and (space or len(word) > 1) for word in words)
    long = space and all(len(word) > 2 or word in _SHORT_UNITS for word in words) and not _FUNCTIONS & set(words)
    if not short and not long:
        return text, ""
    return value.strip(), " ".join(word.removesuffix("s") for word in words) + power.strip("^{}")


def _is_text(text: str) -> bool:
    words = [word for word in _WORD.findall(text) if word not in _FUNCTIONS]
    return bool(words) or (len(text) > 1 and text.isalpha() and text not in _FUNCTIONS and text != "pi")


def _plain(text: str) -> str:
    return _squeezed(text).casefold().strip("()'\"")


def _squeezed(text: str) -> str:
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)  # `5 6` is not 56


def _verified(label: str, answer: str) -> bool:
    """math-verify's judgement. Its timeouts are off: they need signals, and the grader process has a deadline."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    configs = (_LATEX,)
    sides = [parse(f"${side.replace('%', chr(92) + '%')}$", configs, parsing_timeout=None) for side in (label, answer)]
    # Without a parsed value on both sides only strings are left to compare, and those were compared above.
    if not all(any(not isinstance(value, str) for value in side) for side in sides):
        return False
    return bool(verify(sides[0], sides[1], timeout_seconds=None))
