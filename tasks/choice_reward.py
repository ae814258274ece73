"""The reward for multiple choice: the letter that a response settles on, or the text of a choice."""

import re
import unicodedata
from typing import Any

from milepost.tasks.extraction import after_thinking, last_boxed
from milepost.tasks.verdict import Sample, Verdict, ungradable

LETTERS = "ABCDEFGHIJ"
NEAR = 40
MAX_TAIL = 20_000  # characters at the end of a response that are read

_END = r"(?![A-Za-z0-9'\u2019])"  # of a letter that is no word's
_MARKED = re.compile(
    r"\b(?:answer|(?:correct|right|best) (?:option|choice|letter))\b[\s*_]*(?:\bis\b|:|=)?[\s*_:]*"
    r"(?:(?:the )?(?:option|choice|letter)\b\s*)?(\S[^\n]*)",
    re.IGNORECASE,
)
_FIRST = re.compile(rf"[\s$({{\[*_`'\"]*(?:\\(?:text|mathrm)(?:bf)?\s*\{{)?[\s({{\[*_]*([A-Za-z]){_END}(.*)", re.DOTALL)
_ALONE = re.compile(rf"(?<![A-Za-z0-9'\u2019\\-])([A-Z]){_END}")
_JOINED = re.compile(rf"[)}}\]*_.\s]*(?:,|/|&|\bor\b|\band\b)\s*(?:(?:or|and)\s+)?[({{\[*_]*([A-Z]){_END}")
_RIGHT_AFTER = re.compile(r"[)\]*_.]*\s+is\s+(?:the\s+)?(?:correct|right|best)\b")
_WRONG_AFTER = re.compile(
    r"[)\]*_.]*\s+(?:(?:is|are|can|must|could)(?:\s+be)?\s*(?:not\b|n't\b|wrong|incorrect|false|ruled)|fails?\b|isn't|cannot)"
)
_WRONG_BEFORE = re.compile(r"(?:\bnot|n't(?: be)?|\bexcept|\brules? out|\beliminates?)[\s(*_]*$")
_LABELLED = re.compile(r"\s*[).:\]}*]")
_ARTICLE = re.compile(r"\s+(?!(?:because|since|as|is|for|which|that|and|or|with)\b)[a-z]")


def multiple_choice(sample: Sample, *, letters: str = LETTERS) -> Verdict:
    """1.0 when the letter that the response settles on is the right one; otherwise 0.0.

    Valid letters are `valid_letters` of the metadata, as many as it has `choices`, or `letters`. The right one is
    `correct_letter` of the metadata, else the label: a letter, the place of a choice from 0, or a choice's text.
    The response settles on the letter in its last box, after its last "answer is", or before its last "is correct",
    else on the last one that stands alone; or on the choice whose text its box or last line is. Two letters are none.
    """
    label = sample.metadata.get("correct_letter", sample.label)
    choices = _choices(sample.metadata)
    valid = _valid(sample.metadata, choices, letters)
    right = "" if multiple_choice_label_problem(label) else _right(label, choices, valid)
    if not right:
        return ungradable(label, f"give a letter of {valid}, the place of a choice from 0, or the text of a choice")
    text = unicodedata.normalize("NFKC", after_thinking(sample.response)[-MAX_TAIL:])
    found = _of_text(text, choices, valid) or _settled(text, valid)
    if not found:
        return Verdict(0.0, reason="no answer")
    return Verdict(float(found == right), reason="" if found == right else "different", extracted=found)


def multiple_choice_label_problem(label: Any, options: Any = None) -> str:
    """Why a label names no choice, as far as that can be told without the choices."""
    if isinstance(label, bool) or not isinstance(label, str | int) or not str(label).strip():
        return "give a letter, the place of a choice counted from 0, or the text of a choice"
    return ""


def _choices(metadata: dict[str, Any]) -> list[str]:
    """The texts of the choices; an object of letters and texts is taken in the order of its letters."""
    choices = metadata.get("choices")
    if isinstance(choices, dict):
        choices = [choices[letter] for letter in sorted(choices)]
    return [str(choice) for choice in choices] if isinstance(choices, list) else []


def _valid(metadata: dict[str, Any], choices: list[str], letters: str) -> str:
    named = metadata.get("valid_letters")
    if isinstance(named, str | list) and named:
        return "".join(map(str, named)).upper()
    return "".join(chr(ord("A") + place) for place in range(min(len(choices), 26))) or letters.upper()


def _right(label: str | int, choices: list[str], valid: str) -> str:
    """The letter that a label means; empty when it means none."""
    if isinstance(label, int):
        return valid[label] if 0 <= label < len(valid) else ""
    boxed = last_boxed(label)
    text = label if boxed is None else boxed
    return _of_text(text, choices, valid) or _leading(text, valid, alone=True) or ""


def _of_text(text: str, choices: list[str], valid: str) -> str:
    """The letter of the one choice whose text is the last box of `text`, or its last line."""
    boxed = last_boxed(text)
    lines = text.strip().splitlines() or [""]
    wanted = _plain(lines[-1] if boxed is None else boxed)
    places = [place for place, choice in enumerate(choices[: len(valid)]) if wanted and _plain(choice) == wanted]
    return valid[places[0]] if len(places) == 1 else ""


def _settled(text: str, valid: str) -> str:
    """The letter that a text settles on; empty when it names none, or two at once."""
    boxed = last_boxed(text)
    if boxed is not None:
        return _leading(boxed, valid, alone=True) or ""
    for tail in reversed(_MARKED.findall(text)):
        letter = _leading(tail, valid)
        if letter is not None:
            return letter
    alone = [found for found in _ALONE.finditer(text) if found[1] in valid and not _misread(found[1], *_around(found))]
    right = [found for found in alone if _RIGHT_AFTER.match(text, found.end())]
    if not alone:
        return _leading(text, valid, alone=True) or ""
    last = (right or alone)[-1]
    at = alone.index(last)
    before_and_last = alone[max(0, at - 1) : at + 1]
    two = any(_joined(_around(found)[0], found[1], valid) for found in before_and_last)
    return "" if two else last[1]


def _around(found: re.Match[str]) -> tuple[str, str]:
    """What stands after a letter, and before it."""
    return found.string[found.end() : found.end() + NEAR], found.string[max(0, found.start() - NEAR) : found.start()]


def _leading(text: str, valid: str, *, alone: bool = False) -> str | None:
    """The letter that `text` begins with, or when `alone`, with nothing but a choice's text; None when it is no letter.

    A small letter is one in brackets or with nothing behind it. Two letters are none: then it is empty.
    """
    found = _FIRST.match(text)
    if not found or _misread(found[1], found[2], ""):
        return None
    letter, rest = found[1].upper(), found[2]
    bare = not rest.strip(" .*_$)]}\n")
    if letter not in valid or (found[1].islower() and not bare and not rest.startswith(")")):
        return None
    if alone and not bare and not _LABELLED.match(rest):
        return None if not _joined(rest, letter, valid) else ""
    return "" if _joined(rest, letter, valid) else letter


def _joined(rest: str, letter: str, valid: str) -> bool:
    """Whether another letter follows as one more answer."""
    found = _JOINED.match(rest)
    return found is not None and found.group(1) in valid and found.group(1) != letter


def _misread(letter: str, after: str, before: str) -> bool:
    """Whether a letter is a word, or what the sentence says is not the answer."""
    word = letter in "AI" and _ARTICLE.match(after) is not None
    return word or _WRONG_AFTER.match(after) is not None or _WRONG_BEFORE.search(before) is not None


def _plain(text: str) -> str:
    return " ".join(re.sub(r"[^\w%+./=<>^-]+", " ", text.casefold()).strip(" .").split())
