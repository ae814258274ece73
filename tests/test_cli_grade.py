"""`milepost grade`: one response, or the rows of a file, and what is wrong with either."""

import json
import subprocess
from pathlib import Path

import pytest

from .test_cli import MILEPOST, milepost, refused

pytestmark = pytest.mark.slow


def rows(path: Path, *found: dict[str, object]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in found))
    return str(path)


def test_a_response_of_a_megabyte_comes_from_a_pipe() -> None:
    command = [MILEPOST, "grade", "math", "--response", "@/dev/stdin", "--label", "4", "--json"]
    text = "x" * 10**6 + r" \boxed{4}"
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(done.stdout)["score"] == 1.0


def test_the_rows_of_a_file_are_graded_in_their_order(tmp_path: Path) -> None:
    path = rows(tmp_path / "rows.jsonl", *({"response": str(at), "label": at % 3} for at in range(5)))
    done = milepost("grade", "exact", "--jsonl", path, "--json", "--workers", "2")
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(row["row"], row["score"]) for row in found] == [(0, 1), (1, 1), (2, 1), (3, 0), (4, 0)]
    assert "grade exact 5/5" in done.stderr
    shown = milepost("grade", "exact", "--jsonl", path).stdout
    assert "mean score" in shown and "0.6000" in shown


def test_options_reach_the_reward() -> None:
    words = ["--response", "abc", "--options", '{"pattern": "b", "search": true}', "--timeout", "5"]
    assert json.loads(milepost("grade", "regex", *words, "--json").stdout)["extracted"] == "b"


def test_what_is_wrong_is_one_sentence(tmp_path: Path) -> None:
    refused(milepost("grade", "exact"), "either --response", "or --jsonl")
    refused(milepost("grade", "exact", "--response", "@/no/such/file"), "/no/such/file", "No such file")
    refused(milepost("grade", "regex", "--response", "a", "--options", "[]"), "--options '[]' must be a JSON object")
    bad = rows(tmp_path / "bad.jsonl", {"response": "a"}, {"answer": "b"})
    refused(milepost("grade", "exact", "--jsonl", bad), "line 2", "'response' is None", "keys found: ['answer']")
    refused(
        milepost("grade", "exakt", "--jsonl", rows(tmp_path / "a.jsonl", {"response": "a"})), "did you mean 'exact'"
    )
