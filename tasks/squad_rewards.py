"""The rewards of question answering: a response and a label as words, by the rules of SQuAD.

Words are in lower case, without punctuation and without a, an and the; where nothing else would be left, these stay.
Scripts that are written without spaces count by character.
"""

import re
import unicodedata
from collections import Counter
from typing import Any

from milepost.tasks.extraction import after_thinking
from milepost.tasks.verdict import Sample, Verdict, ungradable

_ARTICLES = frozenset(("a", "an", "the"))
_ALL_OR_NOTHING = frozenset(("yes", "no", "noanswer"))
# Han, kana, Thai, Lao, Tibetan, Myanmar, Khmer.
_CHARACTERS = (
    "\u0e00-\u0eff\u0f00-\u0fff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uf900-\ufaff\U00020000-\U0003ffff"
)
_SIGN = re.compile(r"[^\w\s]|_")
_CHARACTER = re.compile(rf"([{_CHARACTERS}][\u0300-\u036f\u3099\u309a]*)")


def exact_match(sample: Sample) -> Verdict:
    """1.0 when the words of the response are those of the label, or of one of a list of labels; otherwise 0.0."""
    problem = exact_match_label_problem(sample.label)
    if problem:
        return ungradable(sample.label, problem)
    answer = after_thinking(sample.response).strip()
    found = words(answer)
    if not found:
        return Verdict(0.0, reason="no answer", extracted=answer)
    right = any(found == words(str(label)) for label in _labels(sample.label))
    return Verdict(float(right), reason="" if right else "different", extracted=answer)


def f1(sample: Sample) -> Verdict:
    """The harmonic mean of precision and recall over words, which are parts; of a list of labels, the best.

    Yes, no and noanswer are right or wrong as a whole, on either side.
    """
    problem = f1_label_problem(sample.label)
    if problem:
        return ungradable(sample.label, problem)
    answer = after_thinking(sample.response).strip()
    found = words(answer)
    score, precision, recall = max(_overlap(words(str(label)), found) for label in _labels(sample.label))
    parts = {"f1": score, "precision": precision, "recall": recall}
    return Verdict(score, parts, reason="" if found else "no answer", extracted=answer)


def f1_label_problem(label: Any, options: Any = None) -> str:
    """Why no words could be compared with a label; empty when it is a string, a number or a list of them."""
    labels = _labels(label)
    plain = all(isinstance(each, str | int | float) and not isinstance(each, bool) for each in labels)
    if not labels or not plain or not all(words(str(each)) for each in labels):
        return "give a string with a letter or digit, a number, or a list of them"
    return ""


exact_match_label_problem = f1_label_problem


def words(text: str) -> list[str]:
    """The words that are compared."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    spaced = _CHARACTER.sub(r" \1 ", _SIGN.sub(_without_punctuation, folded))
    found = spaced.split()
    return [word for word in found if word not in _ARTICLES] or found


def _without_punctuation(sign: re.Match[str]) -> str:
    """Nothing for punctuation; a symbol, such as a picture, is a word."""
    character = sign[0]
    return "" if character in "$+<=>^`|~" or unicodedata.category(character).startswith("P") else character


def _labels(label: Any) -> list[Any]:
    return label if isinstance(label, list) else [label]


def _overlap(wanted: list[str], found: list[str]) -> tuple[float, float, float]:
    """F1, precision and recall of words."""
    shared = sum((Counter(wanted) & Counter(found)).values())
    whole = any(" ".join(side) in _ALL_OR_NOTHING for side in (wanted, found))
    if shared == 0 or (whole and wanted != found):
        return 0.0, 0.0, 0.0
    precision, recall = shared / len(found), shared / len(wanted)
    return 2 * precision * recall / (precision + recall), precision, recall
