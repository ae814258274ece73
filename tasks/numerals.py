"""Numerals as exact numbers: integers, decimals, scientific notation, fractions, mixed numbers, percentages."""

import re
from fractions import Fraction

MAX_EXPONENT = 1000
NEAR = Fraction(1, 10**6)  # of its value, between a decimal and a fraction without a finite decimal
NOISE = Fraction(1, 10**12)  # of its value, between decimals: what floating point leaves

_UNSIGNED = r"\d+(?:\.\d*)?"
_DECIMAL = re.compile(
    rf"([-+]?)\s?({_UNSIGNED})(?:(?:[eE]|\s?(?:\\times|\\cdot|\*)\s?10\s?\^)\s?\{{?\s?([-+]?\d+)\s?\}}?)?"
)
_POWER_OF_TEN = re.compile(r"([-+]?)\s?10\s?\^\s?(?:\{\s?([-+]?\d+)\s?\}|(\d))")
_REPEATING = re.compile(r"([-+]?)\s?(\d+)\.(\d*)\\overline\s?\{(\d+)\}")
_INNER = rf"[-+]?\s?{_UNSIGNED}"
_FRACTION = re.compile(
    rf"([-+]?)\s?(?:({_UNSIGNED})\s?/\s?({_INNER})"
    rf"|\\frac\s?(?:\{{\s?({_INNER})\s?\}}|(\d))\s?(?:\{{\s?({_INNER})\s?\}}|(\d)))"
)
_MIXED = re.compile(r"([-+]?)\s?(\d+) ?(?:(?<= )(\d+)\s?/\s?(\d+)|\\frac\s?(?:\{(\d+)\}|(\d))\s?(?:\{(\d+)\}|(\d)))")


def rational(text: str) -> Fraction | None:
    """The exact value of a numeral in normal form, else None. A percentage is its number: `50%` is 50."""
    text = text.removesuffix("%").rstrip()
    if text.startswith("(") and text.endswith(")"):
        text = text[1:-1].strip()
    for pattern, value in _READERS:
        if found := pattern.fullmatch(text):
            sign, *parts = (part for part in found.groups() if part is not None)
            number = value(*parts)
            return -number if sign == "-" and number is not None else number
    return None


def same_number(label: str, answer: str) -> bool | None:
    """Whether two numerals are equal; None when one of them is no numeral.

    As exact numbers, but a decimal may differ by a millionth of the value from a fraction that has no finite decimal,
    and by what floating point leaves from any other. When one of them is a percentage, the other is it in percent or as
    a share.
    """
    wanted, found = rational(label), rational(answer)
    if wanted is None or found is None:
        return None
    if label.endswith("%") == answer.endswith("%"):
        return _near(wanted, found, label, answer)
    percent, other = (wanted, found) if label.endswith("%") else (found, wanted)
    return any(_near(either, other, label, answer) for either in (percent, percent / 100))


def _near(a: Fraction, b: Fraction, *texts: str) -> bool:
    if a == b:
        return True
    if not any("." in text for text in texts):
        return False
    allowed = NOISE if _finite(a) and _finite(b) else NEAR
    return abs(a - b) <= allowed * max(abs(a), abs(b))


def _finite(number: Fraction) -> bool:
    """Whether a number is a finite decimal."""
    rest = number.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest == 1


def _decimal(digits: str, exponent: str = "0") -> Fraction | None:
    if abs(int(exponent)) > MAX_EXPONENT:
        return None
    return Fraction(digits) * Fraction(10) ** int(exponent)


def _power_of_ten(exponent: str) -> Fraction | None:
    return _decimal("1", exponent)


def _fraction(top: str, bottom: str) -> Fraction | None:
    below = Fraction(bottom.replace(" ", ""))
    return Fraction(top.replace(" ", "")) / below if below else None


def _mixed(whole: str, top: str, bottom: str) -> Fraction | None:
    return Fraction(int(whole)) + Fraction(int(top), int(bottom)) if int(bottom) else None


def _repeating(whole: str, before: str, period: str) -> Fraction:
    repeated = Fraction(int(period), int("9" * len(period) + "0" * len(before)))
    return Fraction(f"{whole}.{before or 0}") + repeated


_READERS = (
    (_MIXED, _mixed),
    (_DECIMAL, _decimal),
    (_FRACTION, _fraction),
    (_POWER_OF_TEN, _power_of_ten),
    (_REPEATING, _repeating),
)
