"""The run form of a deployment: what its help says, what it asks for, and what the server refuses by it."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prefect.utilities.schema_tools.validation import validate

from milepost.flows.form import hint, name_pattern, run_form
from milepost.flows.recipe import load_recipe
from milepost.flows.regrade import regrade
from milepost.flows.sft import sft
from milepost.flows.train import train
from milepost.storage.parameters import Parameters
from milepost.tasks.rewards import GROUP, REWARDS

RECIPES = sorted((Path(__file__).parents[1] / "deployments" / "recipes").glob("*.yaml"))
RECIPE: dict[str, Any] = {
    "optimizer": {"lr": 1e-5, "clip_grad": 1.0, "decay_steps": 9},
    "eval": {"path": "held-out.jsonl", "sets": [{"path": "more.jsonl", "top_p": 0.9}]},
}
PATTERN = name_pattern(REWARDS, GROUP, optional=False)
FORM, OF_RECIPE = run_form(train, {}), run_form(train, RECIPE)


def refused(form: dict[str, Any], **parameters: Any) -> list[str]:
    return [error.message for error in validate(parameters, form)]


def test_a_value_that_a_default_would_silently_replace_cannot_be_emptied() -> None:
    assert refused(OF_RECIPE, optimizer={}) == ["'lr' is a required property"]
    assert refused(OF_RECIPE, optimizer={"lr": 1e-5}) == refused(FORM, optimizer={}) == []
    assert refused(run_form(sft, {}), optimizer={}) == ["'lr' is a required property"], "it has a default of its own"


def test_what_is_empty_by_default_can_be_emptied_and_lists_ask_for_no_more_than_before() -> None:
    assert refused(OF_RECIPE, eval={}) == refused(OF_RECIPE, eval={"path": "", "sets": []}) == []
    assert refused(OF_RECIPE, eval={"sets": [{"path": "other.jsonl"}]}) == []
    assert refused(OF_RECIPE, eval={"sets": [{}]}) == ["'path' is a required property"]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_fits_its_own_form_which_says_what_it_says(recipe: Path) -> None:
    parameters, _ = load_recipe(str(recipe), [])
    filled = parameters.model_dump(mode="json", exclude_none=True)
    assert refused(run_form(train, filled), **filled) == []
    assert Parameters.model_validate(filled) == parameters


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ({"type": "number", "exclusiveMinimum": 0, "default": 1e-6}, "More than 0; 1e-06 by default."),
        ({"type": "integer", "exclusiveMinimum": 0}, "1 or more."),
        ({"type": "integer", "minimum": -1, "default": -1}, "-1 or more; -1 by default."),
        ({"type": "number", "minimum": 0, "maximum": 1, "default": 0.9}, "From 0 to 1; 0.9 by default."),
        (
            {"type": "number", "minimum": 0, "exclusiveMaximum": 1, "default": 0.0},
            "0 or more, less than 1; 0 by default.",
        ),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, "More than 0, 1 at most."),
        ({"type": "boolean", "default": False}, "Off by default."),
        ({"type": "string", "default": "math"}, "`math` by default."),
        ({"type": "string", "default": "/a" * 40}, ""),
        ({"type": "string", "default": ""}, ""),
        ({"type": "array", "default": []}, ""),
    ],
)
def test_help_says_bounds_and_default_in_words(field: dict[str, Any], said: str) -> None:
    assert hint(field) == said


def test_they_stand_behind_what_a_field_is_and_before_what_else_is_said_of_it() -> None:
    fields = FORM["definitions"]["OptimizerSection"]["properties"]
    assert fields["lr"]["description"] == "Peak learning rate. More than 0; 1e-06 by default."
    assert "end of the run. 1 or more.\n\nThat is" in fields["decay_steps"]["description"]
    assert FORM["properties"]["steps"]["description"] == "Trips around the DAG. 1 or more; 10 by default."


def test_a_number_that_may_be_empty_is_refused_with_the_bound_it_crosses() -> None:
    assert refused(FORM, optimizer={"decay_steps": 0}) == ["0 is less than or equal to the minimum of 0"]
    assert refused(FORM, optimizer={"decay_steps": None}) == refused(FORM, optimizer={"decay_steps": 3}) == []


def test_the_page_sends_no_null_for_what_is_left_empty_and_no_reward_that_nobody_chose() -> None:
    assert "default" not in FORM["definitions"]["OptimizerSection"]["properties"]["decay_steps"]
    assert None not in FORM["properties"]["optimizer"]["default"].values()
    assert {"type": "null"} in run_form(regrade, {})["properties"]["reward"]["anyOf"]


@pytest.mark.parametrize(
    ("section", "field", "name"),
    [
        ("reward", "name", "boxed_math"),
        ("rollout", "function", "multi_turn"),
        ("filter", "group", "nonzero_std"),
        ("filter", "sample", "not_truncated"),
        ("algorithm", "advantage", "grpo"),
        ("algorithm", "loss", "gspo"),
        ("engines", "router_policy", "sticky"),
    ],
)
def test_an_unknown_name_is_refused_with_the_known_ones(section: str, field: str, name: str) -> None:
    (message,) = refused(FORM, **{section: {field: f"{name}x"}})
    assert message.startswith(f"'{name}x' does not match") and name.removeprefix("boxed_") in message
    assert refused(FORM, **{section: {field: name}}) == refused(FORM, **{section: {field: "pkg.mod:fn"}}) == []


def test_rewards_in_lists_are_known_too_and_that_of_a_set_may_be_empty() -> None:
    assert len(refused(FORM, reward={"parts": [{"name": "exat"}]})) == 1
    assert len(refused(FORM, eval={"sets": [{"path": "a", "reward": "exat"}]})) == 1
    sets = [{"path": "a", "reward": ""}, {"path": "b", "reward": "exact"}]
    assert refused(FORM, eval={"sets": sets}, data={"sets": sets}) == []


@given(st.text(min_size=1) | st.sampled_from(sorted(REWARDS)))
def test_a_name_is_let_through_when_it_is_built_in_or_has_a_colon(name: str) -> None:
    schema = {"properties": {"name": {"type": "string", "pattern": PATTERN}}}
    assert bool(refused(schema, name=name)) == (":" not in name and name.removeprefix("boxed_") not in REWARDS)
