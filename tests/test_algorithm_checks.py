"""What of an algorithm does not go together is one sentence with the value and the fix, before anything starts."""

from pathlib import Path

import pytest

from milepost.engines.tiny_model import write_tiny_model
from milepost.engines.tokenizer import write_character_tokenizer
from milepost.flows.algorithm_checks import check_algorithm
from milepost.flows.other_models import as_recorded, check_others, other_models
from milepost.flows.recipe import load_recipe
from milepost.storage.batch_plan import batch_plan
from milepost.storage.parameters import Parameters
from milepost.storage.stages import Course

KNOBS = ["data.rollout_batch_size=4", "algorithm.num_steps_per_rollout=2"]
PLUS_PLUS = "algorithm.advantage=reinforce_plus_plus"
GAE = "algorithm.advantage=gae"


def parameters(*overrides: str, samples: int = 2) -> Parameters:
    return load_recipe(None, [*KNOBS, f"data.n_samples_per_prompt={samples}", *overrides])[0]


def checked(chosen: Parameters, course: Course | None = None) -> None:
    check_algorithm(chosen, batch_plan(chosen), *([course] if course else []))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm.kl_loss_coef=0.1", PLUS_PLUS, "algorithm.kl_reward_coef=0.2"], "is 0.1 and kl_reward_coef 0.2"),
        (["algorithm.kl_reward_coef=0.2"], "kl_reward_coef is 0.2 and advantage 'grpo' has no reward for each token"),
        (["algorithm.kl_unbiased=true"], "kl_unbiased is on and the loss has no divergence"),
        (["algorithm.gamma=0.9"], "gamma is 0.9 and advantage 'grpo' discounts nothing"),
        (["algorithm.advantage=ppo"], "'ppo' is called 'gae' here, .*: take gae"),
        (["critic.lr=1e-4"], "critic.lr is 0.0001 and advantage 'grpo' has no critic: leave it out, or set .*=gae"),
        (["critic.pretrain_steps=2", PLUS_PLUS], "pretrain_steps is 2 and advantage 'reinforce_plus_plus' has no"),
        (["algorithm.gae_lambda=0.9"], "gae_lambda is 0.9 and advantage 'grpo' has no critic"),
        (["reference.refresh_every_steps=3"], "is 3 and nothing is compared with a reference"),
        (["rollout.temperature=0"], "temperature is 0, .* raise it, or set engines.train=none"),
    ],
)
def test_what_does_not_go_together_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        checked(parameters(*overrides))


@pytest.mark.parametrize("name", ["grpo", "gspo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline"])
def test_a_group_of_one_has_nothing_to_compare(name: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}' .* with data.n_samples_per_prompt 1 it is always 0"):
        checked(parameters(f"algorithm.advantage={name}", samples=1))
    with pytest.raises(ValueError, match="'nonzero_std' drops every group of one sample"):
        checked(parameters("algorithm.advantage=reinforce", "filter.group=nonzero_std", samples=1))


def test_what_goes_together_is_not_refused() -> None:
    checked(parameters())
    checked(parameters(PLUS_PLUS, "algorithm.kl_reward_coef=0.1", "algorithm.gamma=0.9", samples=1))
    critic = ["critic.lr=1e-4", "critic.pretrain_steps=2", "algorithm.gae_lambda=0.9"]
    checked(parameters(GAE, "algorithm.kl_reward_coef=0.1", "algorithm.gamma=0.9", *critic, samples=1))
    checked(parameters("algorithm.kl_loss_coef=0.1", "algorithm.kl_unbiased=true", "reference.refresh_every_steps=3"))
    checked(parameters("rollout.temperature=0", "engines.train=none", samples=1), Course(last="filter"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random models: `own`, and others that differ from it in weights, in layers, or in what their tokens are."""
    folder = tmp_path_factory.mktemp("models")
    for name, layers, characters in (
        ("own", 1, "01+="),
        ("same", 1, "01+="),
        ("deep", 2, "01+="),
        ("other", 1, "10+="),
    ):
        write_character_tokenizer(str(folder / name), characters)
        write_tiny_model(str(folder / name), vocab_size=7, hidden=32, layers=layers, heads=4, kv_heads=2, seed=layers)
    return folder


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("deep", "has layers 2 and the model 1"),
        ("other", "another tokenizer, 2 of whose 7 tokens the model does not have under the same ids"),
        ("nothing", "reference.path cannot be used: model '.*nothing' does not exist"),
    ],
)
def test_a_reference_that_the_model_cannot_be_compared_with_is_refused(models: Path, name: str, message: str) -> None:
    chosen = parameters(f"reference.path={models / name}")
    with pytest.raises(ValueError, match=message):
        check_others(chosen, other_models(chosen), str(models / "own"))


def test_a_critic_may_begin_as_any_model_of_the_shape(models: Path) -> None:
    for name, message in (("deep", "critic.path .* has layers 2 and the model 1"), ("nothing", "critic.path cannot")):
        chosen = parameters(GAE, f"critic.path={models / name}")
        with pytest.raises(ValueError, match=message):
            check_others(chosen, other_models(chosen), str(models / "own"))
    chosen = parameters(GAE, f"critic.path={models / 'same'}")
    check_others(chosen, other_models(chosen), str(models / "own"))
    assert other_models(chosen) == {"critic": str(models / "same")}


def test_a_reference_stays_where_the_run_found_it(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(models)
    chosen = parameters("reference.path=./same")
    check_others(chosen, other_models(chosen), "own")
    recorded = as_recorded(chosen, other_models(chosen))
    monkeypatch.chdir("/")
    assert other_models(chosen, recorded) == {"reference": str(models / "same")}
    assert other_models(parameters()) == {} and as_recorded(parameters(), {}) == {}
