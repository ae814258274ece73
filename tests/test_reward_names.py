"""What holds of every built-in reward: its name, its box, its labels, and the code that its hash covers."""

import ast
import importlib.util
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from milepost.tasks import rewards
from milepost.tasks.rewards import REWARDS, check_reward, get_reward, grader_id, label_problem
from milepost.tasks.verdict import Sample
from tests.reward_tables import verdict

OWN = "def length(sample): return len(sample.response)\n"
OWN += "def length_label_problem(label, options): return '' if label else 'give a length'\n"
SCHEMA = {"type": "integer"}
MEGABYTE = [
    "\\boxed{" * 150_000,
    "{" * 1_000_000,
    "\\boxed{" + "{" * 500_000 + "}" * 500_000 + "}",
    "#### " + "1," * 500_000,
    "answer: " * 125_000,
    "answer " + " " * 1_000_000,
    "$" * 1_000_000,
    "\\(" * 500_000,
    "A " * 500_000,
    "```json\n" * 125_000,
    "<think>" * 140_000,
    '{"a":' * 200_000,
    "\u5317" * 300_000,
]


@pytest.mark.parametrize(
    ("name", "response", "label", "score"),
    [
        ("boxed_exact_match", "I say \\boxed{Paris}.", "paris", 1),
        ("boxed_exact_match", "Paris", "paris", 0),
        ("boxed_exact_match", "\\boxed{}", "paris", 0),
        ("boxed_f1", "\\boxed{red cat}", "cat", 2 / 3),
        ("boxed_exact", "\\boxed{ 5 }", "5", 1),
        ("boxed_regex", "\\boxed{ab12}", r"[a-z]+\d+", 1),
        ("boxed_math", "5 is wrong, \\boxed{\\frac12}", "0.5", 1),
        ("boxed_math", "The answer is 5", "5", 0),
        ("boxed_math", "\\boxed{x = 5}", "5", 1),
        ("boxed_deepscaler", "</think>\\boxed{5}", "5", 1),
        ("boxed_dapo", "so \\boxed{5}", "5", 1),
        ("boxed_dapo", "Answer: 5", "5", -1),
        ("boxed_gsm8k", "\\boxed{1,000}", "#### 1000", 1),
        ("boxed_gsm8k", "#### 1000", "1000", 0),
        ("boxed_multiple_choice", "A, no: \\boxed{C}", "C", 1),
        ("boxed_gpqa", "\\boxed{\\text{C}}", "C", 1),
        ("boxed_json_schema", "\\boxed{5}", SCHEMA, 1),
        ("boxed_format", "\\boxed{<answer>5</answer>}", None, 0),
        ("boxed_exact_match", "<think>\\boxed{Paris}</think>\\boxed{Rome}", "Rome", 1),
        ("boxed_exact_match", "<think>\\boxed{Paris}</think>Rome", "Paris", 0),
        ("boxed_exact_match", "\\boxed{a {nested} box}", "nested box", 1),
        ("boxed_exact_match", "\\boxed{Rome} or \\boxed{Paris", "Rome", 1),
        ("boxed_exact_match", "\\\\boxed{Rome}", "Rome", 1),
    ],
)
def test_any_reward_can_be_asked_of_the_last_box(name: str, response: str, label: object, score: float) -> None:
    assert verdict(name, response, label).score == pytest.approx(score)


def test_a_boxed_reward_is_checked_and_hashed_as_one() -> None:
    check_reward("boxed_exact", {"ignore_case": True})
    assert grader_id("boxed_f1").partition("@")[2] != grader_id("f1").partition("@")[2]
    with pytest.raises(LookupError, match="did you mean 'math'"):
        get_reward("boxed_maths")
    with pytest.raises(ValueError, match="has no option 'ignore_cose', did you mean 'ignore_case'"):
        check_reward("boxed_exact", {"ignore_cose": True})


def test_an_own_reward_says_which_labels_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_lengths.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert label_problem("own_lengths:length", 0, {}) == "give a length"
    assert label_problem("own_lengths:length", 5, {}) == ""
    assert label_problem("random", None, {}) == ""


def imported(module: str) -> Iterator[str]:
    """The modules of Milepost that a module imports, and those that these import."""
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    for node in ast.walk(ast.parse(Path(spec.origin).read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("milepost."):
            yield str(node.module)
            yield from imported(str(node.module))


PURE = ["math", "deepscaler", "dapo", "gsm8k", "gpqa", "f1", "exact_match", "json_schema", "format", "length_penalty"]
PLUMBING = {"milepost.tasks.verdict", "milepost.storage.registry"}


@pytest.mark.parametrize("name", [*PURE, "exact", "regex", "random", "deterministic_random", "reasoning_gym"])
def test_the_hash_of_a_grader_covers_all_code_that_decides(name: str) -> None:
    module = REWARDS[name].partition(":")[0]
    assert set(imported(module)) - PLUMBING == set(rewards._PARTS.get(module, ()))


@pytest.mark.slow
@pytest.mark.parametrize("name", PURE)
def test_a_megabyte_of_anything_takes_a_moment(name: str) -> None:
    options = {"max_tokens": 10, "buffer_tokens": 5} if name == "length_penalty" else {}
    label = {"json_schema": SCHEMA, "gpqa": "C"}.get(name, "5")
    for response in MEGABYTE:
        started = time.process_time()
        assert get_reward(name)(Sample("", response, label, {}, 20), **options).score != 1.0
        assert time.process_time() - started < 5.0, response[:20]
