"""What could take unbounded time or memory to evaluate, judged by looking at the text and evaluating none of it."""

import re
from math import prod

MAX_CHARACTERS = 300
MAX_DEPTH = 10
MAX_EXPONENT = 1000
MAX_FACTORIAL = 100
MAX_FUNCTIONS = 8
MAX_BARS = 4
MAX_TERMS = 300  # of brackets and their powers, multiplied out

_POWER = re.compile(r"(\S?)\s?\^\s?([{(]|[-+]?\s?\d+|\\?[A-Za-z]+)?")
_POWER_OF_NUMBER = re.compile(r"(?:[^A-Za-z]|(?<![A-Za-z])[ei])\s?\^")  # `\pi^` ends in an i, too
_TOWER = re.compile(r"\^\s?-?\d+\s?\^")
_INTEGER = re.compile(r"\d+")
_SYMBOL = re.compile(r"\\[A-Za-z]+|[A-Za-z]")
_NO_SYMBOLS = frozenset((r"\sqrt", r"\frac", r"\cdot", r"\times", r"\text", r"\in", r"\cup", r"\infty"))
_FACTORIAL = re.compile(r"(\d+)[)}\s]*!")
_OF_BRACKET = re.compile(r"[)}\]]\s*!")
_PRODUCTS = ("^", r"\cdot", r"\times", "*", ")(", "}{", "!)", "!}")
_FUNCTION = re.compile(r"\\(?:sqrt|sin|cos|tan|cot|sec|csc|arc\w+|sinh|cosh|tanh|log|ln|exp|[dt]?binom)(?![A-Za-z])")
_BINOMIAL = re.compile(r"\\[dt]?binom(?![A-Za-z])")
_OPERATOR = re.compile(r"\\(?:sum|prod|int|iint|iiint|oint|lim)(?![A-Za-z])")


def unbounded(text: str) -> bool:
    """Whether evaluating `text`, an answer in normal form, could take unbounded time or memory."""
    if len(text) > MAX_CHARACTERS or _depth(text) > MAX_DEPTH or text.count("|") > MAX_BARS:
        return True
    if _OPERATOR.search(text) or len(_FUNCTION.findall(text)) > MAX_FUNCTIONS:
        return True
    return _large_factorial(text) or _large_power(text)


def _depth(text: str) -> int:
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return deepest


def _large_factorial(text: str) -> bool:
    """Whether a factorial is of a large number, or of a product or power in brackets; binomials are like them."""
    large = any(int(digits) > MAX_FACTORIAL for digits in _INTEGER.findall(text))
    if _OF_BRACKET.search(text) and (large or any(sign in text for sign in _PRODUCTS)):
        return True
    if _BINOMIAL.search(text) and (large or "^" in text):
        return True
    return text.count("!") > 2 or any(int(digits) > MAX_FACTORIAL for digits in _FACTORIAL.findall(text))


def _large_power(text: str) -> bool:
    """Whether an exponent is large, or the powers of brackets are: `((2^{999})^{999})^{999}`, `(a+b+c)^{99}`.

    A power of a number is no exponent: `e^{x^2}` is fine, `x^{9^9}` is not.
    """
    powers = [(match[1], _exponent(text, match)) for match in _POWER.finditer(text)]
    if _TOWER.search(text) or any("!" in exponent or _POWER_OF_NUMBER.search(exponent) for _, exponent in powers):
        return True
    sizes = [(base, prod(map(int, _INTEGER.findall(exponent)))) for base, exponent in powers]
    outer = prod(max(1, size) for base, size in sizes if base in (")", "]", "}"))
    inner = max((size for base, size in sizes if base not in (")", "]", "}")), default=1)
    symbols = len(set(_SYMBOL.findall(text)) - _NO_SYMBOLS) + text.count(r"\sqrt")
    terms = (outer * (1 + text.count(")("))) ** symbols
    return (symbols > 0 and terms > MAX_TERMS) or outer * max(1, inner) > MAX_EXPONENT


def _exponent(text: str, power: re.Match[str]) -> str:
    """What follows a `^`: all that is in the bracket, when one opens."""
    if power[2] not in ("{", "("):
        return power[2] or ""
    depth = 0
    for at in range(power.end() - 1, len(text)):
        depth += (text[at] in "{(") - (text[at] in "})")
        if depth == 0:
            return text[power.end() : at]
    return text[power.end() :]
