"""The reward `code`: the Python code in a response is run against the label's tests, in a sandbox."""

import re
from collections.abc import Mapping
from typing import Any

from milepost.engines.sandbox import Limits, run
from milepost.tasks.code_tests import CodeTest, read_tests
from milepost.tasks.extraction import after_thinking
from milepost.tasks.verdict import Sample, Verdict

_OPENS = re.compile(r"^[ \t]{0,3}(`{3,}|~{3,})[ \t]*([^\s`]*)[^\n`]*$", re.MULTILINE)
_PYTHON = ("", "python", "py", "python3")


def code(
    sample: Sample,
    *,
    partial: bool = False,
    seconds: float = 8.0,
    test_seconds: float = 4.0,
    memory_bytes: int = 1024**3,
    processes: int = 16,
    max_tests: int = 0,
    preamble: str = "from typing import *",
) -> Verdict:
    """1.0 when the code passes every test, and 0.0 otherwise; with `partial` the share that it passes.

    The code is the last fenced block after the thinking that is Python or untagged; one that is not closed goes
    on to the end. `seconds` is for all tests and has to be less than the reward's time limit, `test_seconds` for each:
    what is not through by then is failed. `max_tests` takes only so many from the front, 0 takes all. `preamble` is
    run before code whose functions are called.
    """
    tests = read_tests(sample.label, function=_function(sample.metadata))
    tests = tests[: max_tests or len(tests)]
    block = extract(sample.response)
    if block is None:
        return Verdict(0.0, {"passed": 0.0, "total": float(len(tests))}, reason="no code block")
    limits = Limits(seconds, min(test_seconds, seconds), memory_bytes, processes)
    failures = _failures(block, tests, limits, preamble)
    passed = sum(not failure for failure in failures)
    score = passed / len(tests) if partial else float(passed == len(tests))
    first = next((f"test {at}: {failure}" for at, failure in enumerate(failures) if failure), "")
    return Verdict(score, {"passed": float(passed), "total": float(len(tests))}, reason=first, extracted=block)


def code_label_problem(label: Any, options: Any = None) -> str:
    """Why no code can be tested by this label, or nothing; metadata may name the function that the label does not."""
    problems = []
    for function in ("", "function"):
        try:
            read_tests(label, function=function)
        except ValueError as error:
            problems.append(str(error))
    return problems[-1] if len(problems) == 2 else ""


def extract(response: str) -> str | None:
    """The last block of code, or None."""
    text = after_thinking(response)
    found, place = None, 0
    while opened := _OPENS.search(text, place):
        fence, language = opened.groups()
        closes = re.compile(rf"^[ \t]{{0,3}}{fence[0]}{{{len(fence)},}}[ \t]*$", re.MULTILINE)
        closed = closes.search(text, opened.end())
        end = closed.start() if closed else len(text)
        if language.lower() in _PYTHON:
            found = text[opened.end() + 1 : end]
        place = closed.end() if closed else len(text)
    return found


def _failures(block: str, tests: list[CodeTest], limits: Limits, preamble: str) -> list[str]:
    if "\0" in block:
        return ["the code holds a null byte"] * len(tests)
    outcomes = run(block, [test.case for test in tests], limits, preamble=preamble)
    return [test.failure(outcome) for test, outcome in zip(tests, outcomes, strict=True)]


def _function(metadata: Mapping[str, Any]) -> str:
    return str(metadata.get("func_name") or metadata.get("fn_name") or metadata.get("entry_point") or "")
