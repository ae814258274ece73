"""JSON that a schema allows: the table is the specification."""

from typing import Any

import pytest

from milepost.tasks.rewards import label_problem
from tests.reward_tables import short, verdict

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "minLength": 1}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}
TREE = {"$ref": "#/$defs/node", "$defs": {"node": {"type": "array", "items": {"$ref": "#/$defs/node"}}}}
DEEP = "[" * 400 + "]" * 400
TABLE: list[tuple[str, Any, float | None]] = [
    ('{"name": "Ada", "age": 36}', PERSON, 1),
    ('{"name": "Ada"}', PERSON, 1),
    (' \n{"name": "Ada"}\n ', PERSON, 1),
    ('{"name": "\u5317\u4eac"}', PERSON, 1),
    ('<think>{"age": 1}</think>{"name": "Ada"}', PERSON, 1),
    ('```json\n{"name": "Ada"}\n```', PERSON, 1),
    ('```\n{"name": "Ada"}\n```', PERSON, 1),
    ('Here:\n```JSON\n{"name": "Ada"}\n```\nDone.', PERSON, 1),
    ('```json\n{}\n```\nno,\n```json\n{"name": "Ada"}\n```', PERSON, 1),
    ('{"name": "Ada", "age": 36.0}', PERSON, 1),
    ("1", {"type": "integer"}, 1),
    ("1", '{"type": "integer"}', 1),
    ("[1, 2]", {"type": "array", "items": {"type": "integer"}}, 1),
    ('"a"', {"enum": ["a", "b"]}, 1),
    ("null", {"type": "null"}, 1),
    ("{}", {}, 1),
    ("{}", True, 1),
    ("[[], [[]]]", TREE, 1),
    ('"2020-13-45"', {"type": "string", "format": "date"}, 1),
    ('"aab"', {"pattern": "^a+b$"}, 1),
    ("{}", False, 0),
    ('{"age": 36}', PERSON, 0),
    ('{"name": ""}', PERSON, 0),
    ('{"name": "Ada", "age": -1}', PERSON, 0),
    ('{"name": "Ada", "age": "36"}', PERSON, 0),
    ('{"name": "Ada", "age": 36.5}', PERSON, 0),
    ('{"name": "Ada", "extra": 1}', PERSON, 0),
    ("[]", PERSON, 0),
    ("true", {"type": "integer"}, 0),
    ("[[1]]", TREE, 0),
    ('{"name": "Ada"} and more', PERSON, 0),
    ("{'name': 'Ada'}", PERSON, 0),
    ('{"name": "Ada",}', PERSON, 0),
    ('{"name": "Ada"', PERSON, 0),
    ('{"name": "Ada", "name": "Eve"}', PERSON, 0),
    ('```json\n{"name": "Ada"}', PERSON, 0),
    ("NaN", {}, 0),
    ("Infinity", {}, 0),
    ("1e999", {}, 0),
    ("", {}, 0),
    ("name: Ada", {}, 0),
    ("<think>{}</think>", {}, 0),
    ("[" * 100_000, {}, 0),
    ("9" * 5000, {}, 0),
    ("```json\n" * 20_000, PERSON, 0),
    (f'"{"a" * 3_000_000}"', {}, 0),
    ("1", None, None),
    ("1", "", None),
    ("1", "integer", None),
    ("1", 5, None),
    ("1", {"type": "whole"}, None),
    ("1", {"pattern": "("}, None),
    ('"x"', {"type": "string", "minLength": -1}, None),
]


@pytest.mark.parametrize(("response", "label", "score"), TABLE, ids=short)
def test_a_response_is_what_the_schema_allows_or_not(response: str, label: Any, score: float | None) -> None:
    said = verdict("json_schema", response, label)
    assert said.score == score
    assert bool(said.reason) == (score != 1)
    assert bool(label_problem("json_schema", label, {})) == (score is None)


def test_the_reason_says_where_and_the_parts_say_whether_it_is_json() -> None:
    wrong = verdict("json_schema", '{"name": "Ada", "age": -1}', PERSON)
    assert (wrong.reason, wrong.parts) == ("$.age: -1 is less than the minimum of 0", {"parses": 1.0})
    assert verdict("json_schema", "{", PERSON).parts == {"parses": 0.0}


def test_one_schema_for_all_is_an_option() -> None:
    assert verdict("json_schema", "1", "not looked at", schema='{"type": "integer"}').score == 1.0
    assert label_problem("json_schema", None, {"schema": '{"type": "integer"}'}) == ""
    assert "valid JSON schema" in label_problem("json_schema", None, {"schema": '{"type": "whole"}'})


def test_a_schema_elsewhere_is_not_fetched() -> None:
    said = verdict("json_schema", "1", {"$ref": "http://127.0.0.1:9/schema.json"})
    assert said.score is None and said.reason.startswith("the schema refers elsewhere")
    assert verdict("json_schema", DEEP, TREE).score is not None
