"""Whether two mathematical answers are equal: numerals as exact numbers, words as text, the rest by math-verify."""

import logging
import re
from dataclasses import replace
from itertools import pairwise

from math_verify import LatexExtractionConfig, parse, verify

from milepost.tasks.math_bounds import unbounded
from milepost.tasks.numerals import rational, same_number

MAX_COMMAS = 20  # of lists that are more than numbers and words

_FUNCTIONS = frozenset(
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log exp sqrt lim max min mod inf gcd lcm".split()
)
_SHORT_UNITS = frozenset("m g s h l n j w v k c f cm mm km kg mg ml ft in yd mi lb oz hr mph".split())
_WITH_UNIT = re.compile(r"(.*[\d}%])(\s*)([A-Za-z][A-Za-z. /]*)(\^\{?[23]\}?)?")
_ENVIRONMENT = re.compile(r"\\(?:begin|end|mathbb|mathcal)\s?\{\w+\}")
_WORD = re.compile(r"(?<!\\)(?<![A-Za-z\\])[A-Za-z]{3,}")
_ASSIGNMENT = re.compile(r"[A-Za-z](?:\([a-z]\))?\s?=\s?([^=<>]+)")
_CONJUNCTION = re.compile(r",?\s(?:and|or)\s")
_BRACKETED = re.compile(r"([(\[]|\\\{)(.*)([)\]]|\\\})")
_SETS = frozenset(("", r"\{\}"))
# Units are told apart here: math-verify would drop the `ab` of `2ab`.
_LATEX = LatexExtractionConfig(normalization_config=replace(LatexExtractionConfig().normalization_config, units=False))


def difference(label: str, answer: str) -> str | None:
    """None when two normal forms are equal, else in a word why they are not."""
    if _squeezed(label) == _squeezed(answer):
        return None
    if unbounded(answer) or unbounded(label):
        return "undecidable"
    answer, label = _same_side(answer, label), _same_side(label, answer)
    (answer, unit), (label, wanted_unit) = _split_unit(answer), _split_unit(label)
    if unit and wanted_unit and unit != wanted_unit:
        return "unit"
    equal = _simply_equal(label, answer)
    if equal is None:
        sides = [_listed(side) for side in (label, answer)]
        equal = _same_members(*sides)
        if equal is None and max(side.count(",") for side in sides) > MAX_COMMAS:
            return "undecidable"
        if equal is None:
            equal = not any(map(_is_text, sides)) and _verified(*sides)
    return None if equal else "different"


def _simply_equal(label: str, answer: str) -> bool | None:
    """Whether two answers are the same number or the same text; None when that takes mathematics."""
    equal = same_number(label, answer)
    if equal is not None:
        return equal
    if _squeezed(label) == _squeezed(answer):
        return True
    if _is_text(answer) or _is_text(label):
        return True if _plain(answer) == _plain(label) else None
    return None


def _same_members(label: str, answer: str) -> bool | None:
    """Whether two lists are equal, in round or square brackets in order, else as sets; None if it takes mathematics."""
    (wanted_brackets, wanted), (brackets, found) = _members(label), _members(answer)
    if len(wanted) < 2 or len(found) < 2 or any("=" in one for one in (*wanted, *found)):
        return None
    sets = {brackets, wanted_brackets} <= _SETS
    if not sets and brackets != wanted_brackets:
        return False
    if not all(rational(one) is not None or _is_text(one) for one in (*wanted, *found)):
        return None
    if sets:
        return _all_in(wanted, found) and _all_in(found, wanted)
    return len(wanted) == len(found) and all(map(_simply_equal, wanted, found))


def _all_in(members: list[str], others: list[str]) -> bool:
    return all(any(_simply_equal(one, other) for other in others) for one in members)


def _members(text: str) -> tuple[str, list[str]]:
    """The brackets around all of `text`, if any, and what is between the commas."""
    found = _BRACKETED.fullmatch(text)
    inside = _parts(found[2]) if found else None
    return (found[1] + found[3], inside) if found and inside else ("", _parts(text) or [text])


def _parts(text: str) -> list[str] | None:
    """`text` split at the commas that are in no brackets; None when its brackets do not match."""
    depth, cuts = 0, [-1]
    for at, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth < 0:
            return None
        if character == "," and depth == 0:
            cuts.append(at)
    return [text[a + 1 : b].strip() for a, b in pairwise([*cuts, len(text)])] if depth == 0 else None


def _same_side(text: str, other: str) -> str:
    """The right side of `x = 5` when the other answer is no equation."""
    found = _ASSIGNMENT.fullmatch(text)
    return found.group(1).strip() if found and "=" not in other else text


def _listed(text: str) -> str:
    """`1 or 2` as `1, 2`; words stay as they are."""
    parts = [part.strip() for part in _CONJUNCTION.split(text)]
    return text if any(map(_is_text, parts)) or not all(parts) else ", ".join(parts)


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
    if (not short and not long) or {"and", "or"} & set(words):
        return text, ""
    return value.strip(), " ".join(word.removesuffix("s") for word in words) + power.strip("^{}")


def _is_text(text: str) -> bool:
    text = _ENVIRONMENT.sub("", text)
    words = [word for word in _WORD.findall(text) if word not in _FUNCTIONS]
    return bool(words) or (len(text) > 1 and text.isalpha() and text not in _FUNCTIONS)


def _plain(text: str) -> str:
    return _squeezed(text).casefold().strip("()'\"")


def _squeezed(text: str) -> str:
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)  # `5 6` is not 56


def _verified(label: str, answer: str) -> bool:
    """math-verify's judgement. Its timeouts are off: they need signals, and the grader process has a deadline."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    sides = [
        parse(f"${side.replace('%', chr(92) + '%')}$", (_LATEX,), parsing_timeout=None) for side in (label, answer)
    ]
    # Without a parsed value on both sides only strings are left to compare, and those were compared above.
    if not all(any(not isinstance(value, str) for value in side) for side in sides):
        return False
    return bool(verify(sides[0], sides[1], timeout_seconds=None, allow_set_relation_comp=True))
