"""The reward `code`: which block is the answer, which tests a label may hold, and what hostile code comes to."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from milepost.engines.plain import plain
from milepost.engines.sandbox import Case, Limits, run
from milepost.tasks.code_reward import code, code_label_problem, extract
from milepost.tasks.code_tests import read_tests, same_output
from milepost.tasks.verdict import Sample, Verdict

DOUBLE = "def f(x): return 2 * x"
DOUBLED = "print(2 * int(input()))"
QUICK = Limits(seconds=6.0, case_seconds=1.0)


def block(source: str) -> str:
    return f"So:\n```python\n{source}\n```\nThat is it."


def graded(source: str, label: Any, metadata: dict[str, Any] | None = None, **options: Any) -> Verdict:
    return code(Sample("", block(source), label, metadata or {}), **{"test_seconds": 1.0, **options})


def outcomes(source: str, *cases: Case) -> list[tuple[Any, str]]:
    return [(outcome.value, outcome.reason) for outcome in run(source, cases, QUICK)]


@pytest.mark.parametrize(
    ("response", "found"),
    [
        ("```python\na\n```", "a\n"),
        ("```py\na\n```\n```\nb\n```", "b\n"),
        ("```python\na\n```\n```bash\nls\n```", "a\n"),
        ("```python\na\n```\n```json\n{}\n```\nend", "a\n"),
        ("````\n```\na\n```\n````", "```\na\n```\n"),
        ("~~~python\na\n~~~", "a\n"),
        ("```Python3 title=x\na\n```", "a\n"),
        ("```python\na", "a"),
        ("  ```python\na\n  ```\n", "a\n"),
        ("<think>\n```python\na\n```\n</think>\nno code", None),
        ("<think>```\n</think>\n```python\nb\n```", "b\n"),
        ("print(1)", None),
        ("", None),
        ("```", ""),
    ],
)
def test_the_answer_is_the_last_block_of_python(response: str, found: str | None) -> None:
    assert extract(response) == found


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("1 2\n", "1 2", True),
        ("1  2 \n\n", "1 2\n", True),
        ("1.0", "1", True),
        ("1e3", "1000", True),
        ("0.1", "0.10", True),
        ("0.1", "0.1000001", False),
        ("1\n2", "1 2", False),
        ("YES", "Yes", False),
        ("", "", True),
        ("", "0", False),
        ("nan", "nan", True),
        ("a\n\nb", "a\nb", False),
    ],
)
def test_outputs_are_the_same_when_their_words_are(printed: str, expected: str, same: bool) -> None:
    assert same_output(printed, expected) is same


@pytest.mark.parametrize(
    ("value", "other", "equal"),
    [
        ((1, 2), [1, 2], True),
        (1.0, 1, True),
        (True, 1, False),
        ({1, 2}, {2, 1}, True),
        ({1: "a"}, {"1": "a"}, False),
        ({"b": 1, "a": 2}, {"a": 2, "b": 1}, True),
        (float("nan"), float("nan"), True),
        ("1", 1, False),
        (b"a", bytearray(b"a"), True),
        ([], {}, False),
    ],
)
def test_values_travel_so_that_equal_ones_stay_equal(value: Any, other: Any, equal: bool) -> None:
    assert (json.dumps(plain(value)) == json.dumps(plain(other))) is equal


@pytest.mark.parametrize(
    ("label", "problem"),
    [
        (["assert f(1) == 2"], ""),
        ("assert f(1) == 2\nassert f(2) == 4", ""),
        ({"inputs": ["1"], "outputs": ["2"]}, ""),
        ('[{"input": "1", "output": "2", "testtype": "stdin"}]', ""),
        (None, "the label is None, expected a list of assert statements"),
        ([], "the label has no tests"),
        (5, "the label is 5"),
        (["assert f("], "is not Python: '(' was never closed"),
        ("[1, 2", "neither JSON nor Python"),
        ([3], "a test is 3"),
        ({"inputs": ["1"], "outputs": []}, "two lists of one length"),
        ({"inputs": [1], "outputs": ["2"], "fn_name": "f"}, "the arguments of 'f' are 1"),
        ([{"input": {}, "output": "1", "testtype": "stdin"}], "expected text for input and output"),
    ],
)
def test_a_label_says_what_is_wrong_with_it(label: Any, problem: str) -> None:
    found = code_label_problem(label)
    assert problem in found if problem else found == ""


def test_what_a_call_is_compared_with_stays_outside_of_the_sandbox() -> None:
    (test,) = read_tests(["assert f([1, 2]) == {'secret': (3,)}"])
    assert test.expected == ({"secret": (3,)},)
    assert "secret" not in json.dumps(vars(test.case))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "label", "metadata", "passed", "total"),
    [
        (DOUBLE, ["assert f(2) == 4", "assert f('a') == 'aa'", "assert f(2) < 5"], {}, 3, 3),
        (DOUBLE, ["assert f(2) == 5", "assert f(2) == 4"], {}, 1, 2),
        (DOUBLE, "assert f(2) == 4\nassert f(3) == 6", {}, 1, 1),
        (DOUBLE, "def check(c):\n    assert c(2) == 4", {"entry_point": "f"}, 1, 1),
        (DOUBLED, {"inputs": ["2\n", "3"], "outputs": ["4\n", "6.0"]}, {}, 2, 2),
        (DOUBLED, {"inputs": [["2"], ["x"]], "outputs": [["4"], ["6"]]}, {}, 1, 2),
        (DOUBLE, {"inputs": [[2], [3]], "outputs": [4, [6]], "fn_name": "f"}, {}, 2, 2),
        (DOUBLE, '[{"input": "[1]", "output": "[1, 1]", "testtype": "functional"}]', {"func_name": "f"}, 1, 1),
        ("class Solution:\n def f(s, a: List): return a", '[{"input": "1", "output": "1"}]', {"func_name": "f"}, 1, 1),
        ("def g(): pass", ["assert f(2) == 4"], {}, 0, 1),
        ("def f(", ["assert f(2) == 4"], {}, 0, 1),
        ("import sys; sys.exit(0)\n" + DOUBLE, ["assert f(2) == 4"], {}, 0, 1),
        ("import os; os._exit(0)\n" + DOUBLE, ["assert f(2) == 4"], {}, 0, 1),
        ("print('test 0 passed'); print({'value': 4, 'reason': ''})", ["assert f(2) == 4"], {}, 0, 1),
        ("class E:\n def __eq__(s, o): return True\ndef f(x): return E()", ["assert f(2) == 4"], {}, 0, 1),
        ("def f(x): f.n = getattr(f, 'n', 0) + 1; return f.n", ["assert f(0) == 1", "assert f(0) == 1"], {}, 2, 2),
        ("def f(x):\n if x: raise ValueError\n return 0", ["assert f(0) == 0", "assert f(1) == 1"], {}, 1, 2),
        ("def f(x):\n while x: pass\n return 0", ["assert f(1) == 0", "assert f(0) == 0"], {}, 1, 2),
    ],
)  # fmt: skip
def test_code_passes_the_tests_that_it_passes(
    source: str, label: Any, metadata: dict[str, Any], passed: int, total: int
) -> None:
    verdict = graded(source, label, metadata)
    assert verdict.parts == {"passed": passed, "total": total}
    assert verdict.score == float(passed == total)
    assert bool(verdict.reason) == (passed < total)


@pytest.mark.slow
def test_a_share_counts_where_it_is_asked_for_and_no_code_passes_nothing() -> None:
    assert graded(DOUBLE, ["assert f(2) == 5", "assert f(2) == 4"], partial=True).score == 0.5
    assert graded(DOUBLE, ["assert f(2) == 4", "assert f(2) == 5"], max_tests=1).score == 1.0
    none = code(Sample("", "I cannot.", ["assert f(2) == 4"], {}))
    assert (none.score, none.reason, none.parts) == (0.0, "no code block", {"passed": 0.0, "total": 1.0})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("while True: pass", "timeout"),
        ("import time; time.sleep(60)", "timeout"),
        ("import os\nwhile True: os.fork()", "exit code 1"),
        ("while True: print('x' * 1000)", "printed more than"),
        ("bytearray(3 * 1024**3)", "exit code 1"),
        ("open('a', 'wb').write(b'x' * 200 * 1024**2)", "exit code 1"),
        ("import socket; socket.create_connection(('127.0.0.1', 22), 1)", "exit code 1"),
        ("import os; os.abort()", "killed by SIGABRT"),
        ("def f(): f()\nf()", "exit code 1"),
    ],
)
def test_code_that_takes_too_much_costs_its_own_case_only(source: str, reason: str) -> None:
    started = time.monotonic()
    first, second = outcomes(f"{source}\n", Case(stdin=""), Case(call="len", args=((),)))
    assert reason in first[1]
    assert second[0] is None and second[1]  # it is loaded anew, and fails again
    assert time.monotonic() - started < 10


@pytest.mark.slow
def test_the_cases_of_one_sandbox_do_not_see_each_other() -> None:
    source = "import os, sys\nprint('left' in os.listdir('.'))\nopen('left', 'w').write('x')"
    assert outcomes(source, Case(stdin=""), Case(stdin="")) == [("False\n", "")] * 2
    background = "import subprocess\nsubprocess.Popen(['sleep', '120'], start_new_session=True)\nprint('on')"
    started = time.monotonic()
    assert outcomes(background, Case(stdin=""), Case(stdin=""))[1] == ("on\n", "")
    assert time.monotonic() - started < 60


@pytest.mark.slow
def test_code_sees_no_secret_no_file_and_no_process_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILEPOST_SECRET", "Zq")
    mine = tmp_path / "labels.json"
    mine.write_text("42")
    source = "import os\nprint('MILEPOST_SECRET' in os.environ, os.path.exists(input()))"
    assert outcomes(source, Case(stdin=str(mine))) == [("False False\n", "")]
    parent = f"print(open('/proc/{os.getpid()}/environ').read())"
    judge = "import os\nprint(os.listdir('/proc/2/fd'), open('/proc/1/environ').read())"
    assert [reason for _, reason in outcomes(parent, Case(stdin="")) + outcomes(judge, Case(stdin=""))] == [
        "exit code 1"
    ] * 2


@pytest.mark.slow
def test_code_deletes_nothing_and_ends_nobody(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("x")
    delete = f"import shutil\nshutil.rmtree({str(tmp_path)!r}, ignore_errors=True)\nprint('tried')"
    system = "import os, json\nos.remove(json.__file__)"
    assert outcomes(delete, Case(stdin="")) == [("tried\n", "")]
    assert outcomes(system, Case(stdin=""))[0][1] == "exit code 1"
    assert (tmp_path / "kept").exists()
    (killed,) = outcomes("import os, signal\nos.kill(os.getppid(), signal.SIGKILL)", Case(stdin=""))
    assert killed[1] == "the sandbox was killed from inside"
