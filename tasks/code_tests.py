"""The tests of the reward `code`, as data sets write them, and what passes one."""

import ast
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from milepost.engines.plain import plain
from milepost.engines.sandbox import Case, Outcome

FORMATS = (
    "a list of assert statements, a test program, or inputs and outputs as in APPS or LiveCodeBench: "
    '{"inputs": [...], "outputs": [...]} or [{"input": ..., "output": ...}], with "fn_name" where a function is called'
)


@dataclass(frozen=True)
class CodeTest:
    """One use of the code and what is expected of it; `expected` holds one value, or others that are as good."""

    case: Case
    expected: tuple[Any, ...]

    def failure(self, outcome: Outcome) -> str:
        """Why an outcome does not pass, or nothing when it does."""
        if outcome.reason:
            return outcome.reason
        if self.case.stdin is not None:
            return "" if any(same_output(outcome.value, text) for text in self.expected) else "another output"
        found = json.dumps(outcome.value)
        return "" if any(found == json.dumps(plain(value)) for value in self.expected) else "another value"


def same_output(printed: str, expected: str) -> bool:
    """Whether two outputs say the same: equal words on each line; numbers may be written differently.

    Spaces between words, and blank lines at either end, do not count.
    """
    lines, wanted = printed.strip().splitlines(), expected.strip().splitlines()
    if len(lines) != len(wanted):
        return False
    return all(_same_words(line.split(), other.split()) for line, other in zip(lines, wanted, strict=True))


def _same_words(words: list[str], wanted: list[str]) -> bool:
    return words == wanted or (len(words) == len(wanted) and all(map(_same_word, words, wanted)))


def _same_word(word: str, wanted: str) -> bool:
    if word == wanted:
        return True
    try:
        return Decimal(word) == Decimal(wanted)
    except InvalidOperation:
        return False


def read_tests(label: Any, *, function: str = "") -> list[CodeTest]:
    """The tests that a label holds; ValueError says what is wrong with one. `function` is called if it names none."""
    if isinstance(label, str):
        if label.lstrip()[:1] in ("[", "{"):
            return read_tests(_json(label), function=function)
        found = [_program(label, function)]
    elif isinstance(label, Mapping) and isinstance(label.get("tests"), list | str):
        return read_tests(label["tests"], function=str(label.get("fn_name") or function))
    elif isinstance(label, Mapping) and {"inputs", "outputs"} <= set(label):
        found = list(_apps(label, str(label.get("fn_name") or function)))
    elif isinstance(label, list):
        found = [_one(item, function) for item in label]
    else:
        raise ValueError(f"the label is {_shown(label)}, expected {FORMATS}")
    if not found:
        raise ValueError(f"the label has no tests, expected {FORMATS}")
    return found


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the label is text that is neither JSON nor Python: {error}") from None


def _one(item: Any, function: str) -> CodeTest:
    if isinstance(item, str):
        return _assertion(item, function)
    if isinstance(item, Mapping) and {"input", "output"} <= set(item):
        name = str(item.get("fn_name") or function)
        functional = item.get("testtype", "functional" if name else "stdin") == "functional"
        return _call(name, _lines(item["input"]), _value(item["output"])) if functional else _printed(item)
    raise ValueError(f"a test is {_shown(item)}, expected {FORMATS}")


def _apps(label: Mapping[str, Any], function: str) -> Iterator[CodeTest]:
    inputs, outputs = label["inputs"], label["outputs"]
    if not (isinstance(inputs, list) and isinstance(outputs, list) and len(inputs) == len(outputs)):
        raise ValueError("the label's inputs and outputs must be two lists of one length")
    for given, wanted in zip(inputs, outputs, strict=True):
        if not function:
            yield _printed({"input": given, "output": wanted})
            continue
        # The data set wraps some results in a list of their own.
        wrapped = isinstance(wanted, list) and len(wanted) == 1
        yield _call(function, given, wanted, *(wanted if wrapped else ()))


def _printed(item: Mapping[str, Any]) -> CodeTest:
    given, wanted = (
        "\n".join(map(str, value)) if isinstance(value, list) else value for value in (item["input"], item["output"])
    )
    if not isinstance(given, str) or not isinstance(wanted, str):
        raise ValueError(f"a test of printed output has {_shown(item)}, expected text for input and output")
    return CodeTest(Case(stdin=given), (wanted,))


def _call(function: str, args: Any, *expected: Any) -> CodeTest:
    if not function:
        raise ValueError(
            'a test calls a function that is not named: give "fn_name" in the label, or metadata.func_name'
        )
    if not isinstance(args, list):
        raise ValueError(f"the arguments of {function!r} are {_shown(args)}, expected a list")
    return CodeTest(Case(call=function, args=tuple(args)), expected)


def _lines(text: Any) -> Any:
    """LiveCodeBench has an argument a line, each as JSON."""
    return [_value(line) for line in text.splitlines() if line.strip()] if isinstance(text, str) else text


def _value(text: Any) -> Any:
    if not isinstance(text, str):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _assertion(source: str, function: str) -> CodeTest:
    """An assert statement. What a call is compared with stays outside of the sandbox where it is a literal."""
    body = _parsed(source).body
    test = body[0].test if len(body) == 1 and isinstance(body[0], ast.Assert) else None
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq):
        try:
            expected = ast.literal_eval(test.comparators[0])
            plain(expected)
        except (ValueError, TypeError):
            return _program(source, function)
        return CodeTest(Case(test=ast.unparse(test.left), returns=True), (expected,))
    return _program(source, function)


def _program(source: str, function: str) -> CodeTest:
    """Source that is passed by running to its end. Where it defines `check`, as HumanEval does, that is called."""
    defined = {item.name for item in _parsed(source).body if isinstance(item, ast.FunctionDef)}
    if "check" in defined:
        if not function:
            raise ValueError("the test defines `check`, and its function is not named: give metadata.entry_point")
        source = f"{source}\ncheck({function})"
    return CodeTest(Case(test=source), (True,))


def _parsed(source: str) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"the test {_shown(source)} is not Python: {error}") from None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
