"""Names of extensions: built in, installed, or dotted."""

import math

import pytest

from milepost.storage.registry import check_arity, resolve

BUILTINS = {"exact": math.floor, "regex": math.ceil}


def test_a_builtin_name_is_found() -> None:
    assert resolve("exact", BUILTINS, group="milepost.rewards") is math.floor


def test_a_dotted_name_is_imported() -> None:
    assert resolve("math:sqrt", BUILTINS, group="milepost.rewards") is math.sqrt


def test_an_unknown_name_offers_the_nearest() -> None:
    with pytest.raises(LookupError, match="unknown milepost.rewards 'exakt', did you mean 'exact'"):
        resolve("exakt", BUILTINS, group="milepost.rewards")


def test_a_missing_module_is_named() -> None:
    with pytest.raises(LookupError, match="cannot import 'no_such_module'"):
        resolve("no_such_module:fn", BUILTINS, group="milepost.rewards")


def test_a_missing_function_is_named() -> None:
    with pytest.raises(LookupError, match="module 'math' has no 'no_such'"):
        resolve("math:no_such", BUILTINS, group="milepost.rewards")


def test_a_wrong_signature_is_refused() -> None:
    def two(a: int, b: int) -> int:
        return a + b

    check_arity(two, 2, name="two", group="milepost.rewards")
    with pytest.raises(ValueError, match=r"'two' must take 1 arguments"):
        check_arity(two, 1, name="two", group="milepost.rewards")
