"""Calls of tools in what a model says: three formats, and what is no call or a broken one."""

import pytest

from milepost.tasks.tool_calls import calls_in, tool_format

ADD = {"left": 1, "right": 2}

CALLS = [
    ("hermes", '<tool_call>\n{"name": "add", "arguments": {"left": 1, "right": 2}}\n</tool_call>', [("add", ADD)]),
    ("hermes", 'So: <tool_call>{"name": "add", "arguments": {"left": 1, "right": 2}}', [("add", ADD)]),
    (
        "hermes",
        '<tool_call>{"name": "a", "arguments": {}}</tool_call> <tool_call>{"name": "b"}</tool_call>',
        [("a", {}), ("b", {})],
    ),
    ("hermes", '<tool_call>[{"name": "a"}, {"name": "b"}]</tool_call>', [("a", {}), ("b", {})]),
    (
        "hermes",
        '<tool_call>{"name": "add", "arguments": "{\\"left\\": 1, \\"right\\": 2}"}</tool_call>',
        [("add", ADD)],
    ),
    ("hermes", '<think><tool_call>{"name": "a"}</tool_call></think>3', []),
    ("hermes", '<think>not yet done <tool_call>{"name": "a"}</tool_call>', []),
    ("hermes", "the sum is 3", []),
    ("hermes", "", []),
    ("llama3", '{"name": "add", "parameters": {"left": 1, "right": 2}}', [("add", ADD)]),
    ("llama3", '<|python_tag|>{"name": "add", "parameters": {"left": 1, "right": 2}}', [("add", ADD)]),
    ("llama3", '{"name": "a", "parameters": {}}; {"name": "b", "arguments": {}}', [("a", {}), ("b", {})]),
    ("llama3", '{"name": "Ada", "age": 36}', []),
    ("llama3", "3", []),
    ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"left": 1, "right": 2}}]', [("add", ADD)]),
    ("mistral", '[TOOL_CALLS][{"name": "a", "arguments": {}}, {"name": "b", "id": "x"}]', [("a", {}), ("b", {})]),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"left": 1, "right": 2}', [("add", ADD)]),
    ("mistral", "[TOOL_CALLS]a[CALL_ID]0[ARGS]{}[TOOL_CALLS]b[ARGS]{}", [("a", {}), ("b", {})]),
    ("mistral", "3", []),
]

BROKEN = [
    ("hermes", "<tool_call>add(1, 2)</tool_call>", "the call is not JSON (Expecting value"),
    ("hermes", "<tool_call></tool_call>", "the call is not JSON"),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>', "expected an object with 'name' and 'arguments'"),
    ("hermes", '<tool_call>{"name": "add", "arguments": [1, 2]}</tool_call>', "the arguments of 'add' are [1, 2]"),
    ("hermes", '<tool_call>{"name": "add", "arguments": "1, 2"}</tool_call>', "expected an object"),
    ("hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>", "the call is not JSON"),
    ("llama3", "<|python_tag|>print(1 + 2)", "the call is not JSON"),
    ("llama3", '{"name": "add", "parameters": {"left": 1', "the call is not JSON"),
    ("mistral", "[TOOL_CALLS]add", "the call is not JSON"),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"left": 1', "the call is not JSON"),
]


@pytest.mark.parametrize(("format", "text", "calls"), CALLS)
def test_calls_are_found_in_the_format_that_a_template_teaches(format: str, text: str, calls: list[object]) -> None:
    assert [(call.name, call.arguments) for call in calls_in(text, format) if not call.problem] == calls


@pytest.mark.parametrize(("format", "text", "problem"), BROKEN)
def test_a_broken_call_has_a_reason_that_the_model_can_read(format: str, text: str, problem: str) -> None:
    (call,) = calls_in(text, format)
    assert problem in call.problem and len(call.problem) < 400


def test_the_format_is_found_in_the_template_or_chosen() -> None:
    assert tool_format("auto", "... <tool_call>\n{...}</tool_call> ...") == "hermes"
    assert tool_format("auto", "Environment: ipython ... '\"parameters\": '") == "llama3"
    assert tool_format("auto", "[TOOL_CALLS][") == "mistral"
    assert tool_format("mistral", "anything") == "mistral"


@pytest.mark.parametrize("template", ["", "{{ messages }}", "<tool_call><function=NAME></function></tool_call>"])
def test_a_template_of_no_known_format_is_refused_with_those_there_are(template: str) -> None:
    with pytest.raises(LookupError, match="calls tools in no format that is known: set rollout.tool_format to one of"):
        tool_format("auto", template)


def test_an_unknown_format_is_refused_with_the_nearest() -> None:
    with pytest.raises(LookupError, match="unknown rollout.tool_format 'hermess', did you mean 'hermes'"):
        tool_format("hermess", "")
