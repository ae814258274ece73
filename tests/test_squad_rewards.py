"""Words compared by the rules of SQuAD: the tables are the specification."""

from typing import Any

import pytest

from milepost.tasks.rewards import label_problem
from tests.reward_tables import short, verdict

TABLE: list[tuple[str, Any, float | None, float | None]] = [  # response, label, exact match, f1
    ("Paris", "Paris", 1, 1),
    ("paris", "PARIS", 1, 1),
    ("The Eiffel Tower!", "eiffel tower", 1, 1),
    ("  the   cat\n", "a cat", 1, 1),
    ("U.S.", "US", 1, 1),
    ("well-known", "wellknown", 1, 1),
    ("$5", "5", 1, 1),
    ("C++", "C", 1, 1),
    ("5", 5, 1, 1),
    ("2.5", 2.5, 1, 1),
    ("\uff30\uff41\uff52\uff49\uff53", "paris", 1, 1),
    ("Stra\u00dfe", "STRASSE", 1, 1),
    ("cafe\u0301", "caf\u00e9", 1, 1),
    ("\u201cyes\u201d", "yes", 1, 1),
    ("<think>Rome</think>Paris", "Paris", 1, 1),
    ("b", ["a b", "b"], 1, 1),
    ("A", "a", 1, 1),
    ("the", "The", 1, 1),
    ("The The", "the the", 1, 1),
    ("\u5317\u4eac", "\u5317\u4eac", 1, 1),
    ("\u5317\u4eac\u3002", "\u5317\u4eac", 1, 1),
    ("\u6771\u4eac \u30bf\u30ef\u30fc", "\u6771\u4eac\u30bf\u30ef\u30fc", 1, 1),
    ("\u041c\u043e\u0441\u043a\u0432\u0430", "\u043c\u043e\u0441\u043a\u0432\u0430", 1, 1),
    ("\u0627\u0644\u0642\u0627\u0647\u0631\u0629", "\u0627\u0644\u0642\u0627\u0647\u0631\u0629", 1, 1),
    ("\U0001f600", "\U0001f600", 1, 1),
    ("noanswer", "noanswer", 1, 1),
    ("\u5317\u4eac\u5e02", "\u5317\u4eac", 0, 0.8),
    ("a an the", "the", 0, 0.5),
    ("red cat", "cat", 0, 2 / 3),
    ("cat", "red cat", 0, 2 / 3),
    ("cat dog", "dog cat", 0, 1),
    ("cat cat", "cat", 0, 2 / 3),
    ("a b c d", "c d e f", 0, 4 / 7),
    ("dog", "cat", 0, 0),
    ("day", "week", 0, 0),
    ("no", "on", 0, 0),
    ("yes it is", "yes", 0, 0),
    ("yes", "yes it is", 0, 0),
    ("1,000", "1 000", 0, 0),
    ("5.0", "5", 0, 0),
    ("", "cat", 0, 0),
    ("?!", "cat", 0, 0),
    ("<think>cat</think>", "cat", 0, 0),
    ("word " * 200_000, "cat", 0, 0),
    ("cat", None, None, None),
    ("cat", "", None, None),
    ("?", "?", None, None),
    ("cat", " ", None, None),
    ("yes", True, None, None),
    ("cat", [], None, None),
    ("cat", ["cat", None], None, None),
    ("cat", {"text": "cat"}, None, None),
]


@pytest.mark.parametrize(("response", "label", "exact", "f1"), TABLE, ids=short)
def test_words_are_compared(response: str, label: Any, exact: float | None, f1: float | None) -> None:
    assert verdict("exact_match", response, label).score == exact
    assert verdict("f1", response, label).score == (None if f1 is None else pytest.approx(f1))
    for name in ("exact_match", "f1"):
        assert bool(label_problem(name, label, {})) == (exact is None)


def test_f1_says_precision_and_recall_of_the_best_label() -> None:
    parts = verdict("f1", "red cat", ["dog", "cat"]).parts
    assert parts == {"f1": pytest.approx(2 / 3), "precision": 0.5, "recall": 1.0}
