"""A run that over-samples: engines are stopped when a step has enough, and the next step goes on with what is left."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from milepost.engines.fleet import Fleet, fleet
from milepost.flows.iteration import iteration
from milepost.flows.loop import recover
from milepost.flows.recipe import load_recipe
from milepost.flows.start import Launched, begin_run
from milepost.flows.step_context import Position
from milepost.storage import manifest, runs
from milepost.storage.accounting import epoch_accounting
from milepost.storage.tables import TableRef, read_table
from milepost.storage.verify import verify

from .over_sampled import OverSampled

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect_server", "ray_cluster")]

SETTINGS = [
    'engines.train="fake"',
    'engines.rollout="fake"',
    "data.apply_chat_template=false",
    "data.shuffle=false",
    "data.rollout_batch_size=4",
    "data.n_samples_per_prompt=2",
    "algorithm.num_steps_per_rollout=2",
    "model.context_length=128",
    "rollout.max_new_tokens=100",
    "rollout.shards=2",
    "rollout.over_sampling_batch_size=8",
    "rollout.partial=true",
    "rollout.mask_older_tokens=true",
    "reward.name=tests.rewards_for_tests:parity",
    "tracking.enabled=false",
]

SLOW = "9"
"""Prompts that have it take half a second a token."""


@dataclass(frozen=True)
class Made(OverSampled):
    """Two steps, the requests that were in flight after each, and what step 1 came to when it was made once more."""

    in_flight: list[int]
    again: tuple[Position, Position]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, model_dir: str) -> Iterator[Made]:
    root = tmp_path_factory.mktemp("over")
    operands = [*(f"3+{number}" for number in range(4)), *(f"{SLOW}+{number}" for number in range(4))]
    prompts = [{"prompt": f"{text}=", "label": "0"} for text in [*operands, *(f"4+{number}" for number in range(8))]]
    Path(root, "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    chosen, _ = load_recipe(None, [*SETTINGS, f"model.path={model_dir}", f"data.path={root}/prompts.jsonl"])
    folder = runs.run_folder(str(root), "over")
    launched = begin_run(str(root), folder, 2, chosen, fence=0)
    slow = read_table(TableRef(**launched.record.data["prompts"]))["prompt_token_ids"][4].as_py()[0]
    options = {"delay_seconds": 0.03, "slow_token": slow, "slow_seconds": 0.5}
    with fleet("over", chosen, model_dir, engine_options=options) as engines:
        yield asyncio.run(_two_steps(launched, engines, str(root)))


async def _two_steps(launched: Launched, engines: Fleet, root: str) -> Made:
    step, first = await recover(launched, engines)
    second = await iteration(root, "over", step, first)
    in_flight = [_in_flight(engines)]
    third = await iteration(root, "over", 1, second)
    in_flight.append(_in_flight(engines))
    return Made(launched.folder, in_flight, (third, await iteration(root, "over", 1, second)))


def _in_flight(engines: Fleet) -> int:
    return sum(int(httpx.get(f"{engine.url()}/get_load").json()[0]["num_reqs"]) for engine in engines.engines)


def test_nothing_is_left_running_in_the_engines_once_a_step_has_enough(made: Made) -> None:
    assert made.in_flight == [0, 0]
    for step in (0, 1):
        counts = manifest.load(made.folder, step).accounting
        assert counts["served"] == 8 and counts["trained"] == 4 and counts["interrupted"] >= 1


def test_the_next_step_goes_on_with_each_response_where_it_stopped(made: Made) -> None:
    assert len(made.former(1)) == 2 * manifest.load(made.folder, 0).accounting["interrupted"]
    assert made.check_continued(1)


def test_tokens_of_older_weights_are_stamped_and_not_trained(made: Made) -> None:
    former = made.former(1)
    mixed = [row for row in made.rows(1) if (row["weight_version_min"], row["weight_version_max"]) == (0, 1)]
    assert mixed
    for row in mixed:
        older = len(former[row["sample_id"]]["response_token_ids"])
        assert row["loss_mask"] == [0] * older + [1] * (len(row["response_token_ids"]) - older)


def test_every_prompt_counts_once_and_the_run_verifies(made: Made) -> None:
    (counts,) = epoch_accounting(made.folder).values()
    assert sum(count for name, count in counts.items() if name != "prompts") == counts["prompts"] == 16
    assert counts["trained"] == 8
    found = verify(made.folder)
    assert found.faults == [] and found.samples == 32


def test_a_step_that_is_made_once_more_takes_all_of_it_from_the_journal(made: Made) -> None:
    assert made.again[0] == made.again[1]


def test_tokens_are_counted_in_the_step_that_generated_them(made: Made) -> None:
    reused = sum(len(row["response_token_ids"]) for row in made.former(1).values() if row["response_token_ids"])
    tokens = sum(len(row["response_token_ids"]) for row in made.rows(1))
    metrics = manifest.load(made.folder, 1).metrics
    assert metrics["rollout/tokens"] == tokens - reused
    assert metrics["rollout/weight_version/mixed_version_ratio"] > 0
    assert metrics["rollout/avg_cached_tokens_per_sample"] == 0.0 and "rollout/spec_accept_rate" not in metrics
