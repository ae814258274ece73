"""Recipes and overrides."""

from pathlib import Path

import pytest

from milepost.flows.recipe import load_recipe, request


def test_overrides_win_over_the_recipe(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("steps: 4\ndata:\n  rollout_batch_size: 8\n  seed: 1\n")
    parameters, values = load_recipe(str(recipe), ["data.rollout_batch_size=2"])
    assert (parameters.data.rollout_batch_size, parameters.data.seed, values["steps"]) == (2, 1, 4)


def test_values_are_json_where_they_parse_and_text_where_not() -> None:
    parameters, _ = load_recipe(None, ['rollout.stop=["a"]', "optimizer.lr=1e-6", "data.path=x.jsonl@[0:3]"])
    assert (parameters.rollout.stop, parameters.optimizer.lr, parameters.data.path) == (["a"], 1e-6, "x.jsonl@[0:3]")


def test_one_value_of_a_field_that_holds_several_is_set_by_its_name(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("engines:\n  sglang:\n    mem_fraction_static: 0.4\n")
    own = ["engines.sglang.attention_backend=triton", "engines.sglang.chunked_prefill_size=2048"]
    parameters, _ = load_recipe(str(recipe), own)
    flags = {"mem_fraction_static": 0.4, "attention_backend": "triton", "chunked_prefill_size": 2048}
    assert parameters.engines.sglang == flags


def test_a_shipped_recipe_is_found_by_name() -> None:
    parameters, _ = load_recipe("demo", [])
    assert parameters.reward.name == "exact"


def test_an_unknown_recipe_lists_the_shipped_ones() -> None:
    with pytest.raises(FileNotFoundError, match="'nothing' does not exist.*smollm2-chain-sum"):
        load_recipe("nothing", [])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimiser.lr=1", "unknown section 'optimiser', did you mean 'optimizer'"),
        ("optimizer.learning_rate=1", r"unknown key 'optimizer.learning_rate'"),
        ("data.rollout_batchsize=1", r"did you mean 'rollout_batch_size'"),
        ("optimizer.lr.peak=1", r"unknown key 'optimizer.lr.peak'; known"),
        ("engines.sglan.port=1", r"unknown key 'engines.sglan.port', did you mean 'sglang'"),
    ],
)
def test_an_unknown_key_offers_the_nearest(override: str, message: str) -> None:
    with pytest.raises(LookupError, match=message):
        load_recipe(None, [override])


def test_an_unknown_key_in_a_file_offers_the_nearest(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("rollout:\n  temprature: 1.0\n")
    with pytest.raises(LookupError, match="did you mean 'temperature'"):
        load_recipe(str(recipe), [])


@pytest.mark.parametrize("text", ["nothing", "a=1", "a.=1", ".b=1"])
def test_an_override_of_another_shape_is_refused(text: str) -> None:
    with pytest.raises((ValueError, LookupError), match="must look like|unknown"):
        load_recipe(None, [text])


def test_a_value_of_the_wrong_type_is_named_with_its_key() -> None:
    with pytest.raises(ValueError, match=r"optimizer\.lr is -1"):
        load_recipe(None, ["optimizer.lr=-1"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.lr=inf", "optimizer.lr is 'inf': input should be a finite number"),
        ("rollout.temperature=Infinity", "rollout.temperature is inf: input should be a finite number"),
        ("rollout.top_k=0", "rollout.top_k: top_k is 0, it must be 1 or more, or -1 for all tokens"),
    ],
)
def test_a_number_that_nothing_can_use_is_refused(override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_recipe(None, [override])


@pytest.mark.parametrize("content", ["[1, 2]", "data: 3", "a: [", ""])
def test_a_file_that_is_no_recipe_is_refused(tmp_path: Path, content: str) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(content)
    with pytest.raises(ValueError, match=r"must hold|not valid YAML"):
        load_recipe(str(recipe), [])


def test_a_request_takes_what_was_typed_before_the_recipe(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("steps: 4\nroot: elsewhere\n")
    wanted = request(str(recipe), [], run=None, root=str(tmp_path), steps=2)
    assert (wanted.steps, wanted.root) == (2, str(tmp_path))
    assert wanted.run.startswith("mine-")


def test_a_run_without_a_name_has_that_of_its_recipe() -> None:
    assert request("qwen3-0.6b", [], run=None, root=None, steps=None).run.startswith("qwen3-0.6b-2")
