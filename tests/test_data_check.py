"""`milepost data check`: what it counts, and when a prompt of one set stands in another."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from milepost.flows.curve import terminal_histogram
from milepost.flows.data_check import DataReport, check_data
from milepost.storage.contamination import NGRAM, asked, index, ngram_hashes, words
from milepost.storage.parameters import DataSection
from milepost.storage.prompts import load_prompts

from .test_cli import milepost
from .test_prompts import Characters, write

LONG = "one two three four five six seven eight nine ten eleven twelve thirteen"
WORDS = st.lists(st.sampled_from(["a", "b", "c"]), max_size=40)


def check(path: Path | str, **wanted: Any) -> DataReport:
    return check_data(DataSection(path=str(path)), **wanted)


def prompts(folder: Path, *texts: Any, name: str = "set.jsonl") -> Path:
    return write(folder, *(json.dumps({"prompt": text}) for text in texts), name=name)


def test_every_row_is_counted_and_a_bad_one_stops_nothing(tmp_path: Path) -> None:
    path = write(tmp_path, '{"prompt": "a"}', "", "{", '{"prompt": "b", "prompt": "c"}', '{"prompt": "d"}')
    found = check(path)
    assert (found.rows, found.malformed.count, found.is_faulty) == (4, 2, True)
    assert [(bad["row"], bad["line"]) for bad in found.malformed.examples] == [(1, 3), (2, 4)]
    assert found.malformed.examples[1]["reason"] == "the key 'prompt' is given twice"


def test_the_digest_is_that_of_the_set_a_run_loads(tmp_path: Path) -> None:
    path = prompts(tmp_path, *(f"p{number}" for number in range(50)))
    loaded = load_prompts(DataSection(path=str(path)), Characters(), context_length=100)
    assert check(path).digest == loaded.digest != check(f"{path}@[1:]").digest


def test_a_row_that_says_the_same_is_a_duplicate_and_one_that_asks_the_same_is_repeated(tmp_path: Path) -> None:
    rows = [{"prompt": "What is 1+1?", "label": 2}] * 2 + [{"prompt": "what IS (1+1)", "label": 3}]
    found = check(write(tmp_path, *map(json.dumps, rows)))
    assert found.duplicates.examples == [{"row": 1, "repeats": 0}]
    assert found.repeated.examples == [{"row": 2, "repeats": 0}] and not found.is_faulty


def test_lengths_are_characters_or_rendered_tokens(tmp_path: Path) -> None:
    path = prompts(tmp_path, "x", "xx", "xxxx")
    assert check(path).lengths | {"mean": 0} == {"min": 1, "median": 2, "p90": 3.6, "p99": 3.96, "max": 4, "mean": 0}
    found = check(path, tokenizer=Characters())
    assert (found.unit, found.lengths["max"]) == ("tokens", 5)
    assert sum(found.histogram["counts"]) == 3


@pytest.mark.parametrize(
    ("text", "other", "shares"),
    [
        (LONG, f"Well: {LONG.upper()}!", "13 words"),
        (f"a {LONG}", f"b {LONG}", "13 words"),
        (LONG.removesuffix(" thirteen"), f"x {LONG}", None),  # 12 words, and another text
        ("Two words", "two, WORDS?", "all"),
        ("\uff46\uff55\uff4c\uff4c\u3000width", "full width", "all"),
        ("?!", "...", None),  # no words are no text
        ("12+7=", "12 - 7 =", None),
        ("12-7=", "12 - 7", "all"),
        ("今天天气很好我们一起去公园", "他说今天天气很好我们一起去公园吧", "13 words"),
    ],
)
def test_what_counts_as_being_in_another_set(tmp_path: Path, text: str, other: str, shares: str | None) -> None:
    against = prompts(tmp_path, "nothing alike", other, name="other.jsonl")
    found = check(prompts(tmp_path, text), against=str(against)).overlap.examples
    assert found == ([{"row": 0, "other": 1, "shares": shares}] if shares else [])


def test_of_a_dialogue_what_the_user_asks_last_is_compared() -> None:
    turns = [("system", LONG), ("user", "first"), ("assistant", "yes"), ("user", "last")]
    dialogue = [{"role": role, "content": content} for role, content in turns]
    assert asked(dialogue) == "last" and asked(dialogue[:1]) == LONG
    parts = [{"type": "image"}, {"type": "text", "text": "what is this"}]
    assert asked([{"role": "user", "content": parts}]) == "what is this"


@given(WORDS, WORDS)
def test_two_texts_share_an_ngram_when_they_share_thirteen_words(left: list[str], right: list[str]) -> None:
    def windows(found: list[str]) -> set[tuple[str, ...]]:
        return {tuple(found[at : at + NGRAM]) for at in range(len(found) - NGRAM + 1)}

    made = index([(7, " ".join(right))])
    assert (made.shares(left) == 7) == bool(windows(left) & windows(right))
    assert len(set(ngram_hashes(left).tolist())) == len(windows(left))


@given(st.text())
def test_words_are_the_same_however_often_they_are_normalised(text: str) -> None:
    assert words(" ".join(words(text))) == words(text)


def test_a_histogram_is_as_high_as_its_counts() -> None:
    drawn = terminal_histogram([1, 4, 2], [0.0, 10.0, 20.0, 30.0], "tokens of a prompt")
    assert "tokens of a prompt" in drawn and "\x1b" not in drawn
    assert "4┤" in drawn and "30" in drawn


def test_check_prints_a_picture_writes_a_file_and_exits_with_3(tmp_path: Path) -> None:
    path, other = prompts(tmp_path, "a b", "c d"), prompts(tmp_path, "C, D", name="held-out.jsonl")
    good = milepost("data", "check", str(path), "--json")
    assert (good.returncode, json.loads(good.stdout)["rows"]) == (0, 2), good.stderr
    found = milepost("data", "check", str(path), "--against", str(other), "--out", str(tmp_path / "found.json"))
    assert found.returncode == 3 and "characters of a prompt" in found.stdout
    assert json.loads((tmp_path / "found.json").read_text())["overlap"]["count"] == 1


def test_a_set_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    done = milepost("data", "check", str(tmp_path / "no.jsonl"))
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "does not exist" in done.stderr
