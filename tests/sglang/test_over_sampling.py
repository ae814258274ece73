"""A run that over-samples on a real SGLang server: what is cut short ends there, and goes on in the next step."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from milepost.engines.rollout_actor import RolloutActor
from milepost.flows.recipe import load_recipe
from milepost.flows.train import train
from milepost.storage import manifest, runs
from milepost.storage.accounting import epoch_accounting
from milepost.storage.parameters import Parameters
from milepost.storage.verify import verify
from tests.over_sampled import OverSampled

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.usefixtures("prefect_server")]

STEPS, LONGEST = 3, 300
SETTINGS = [
    "data.apply_chat_template=false",
    "data.rollout_batch_size=4",
    "data.n_samples_per_prompt=2",
    "algorithm.num_steps_per_rollout=1",
    "model.context_length=512",
    f"rollout.max_new_tokens={LONGEST}",
    "rollout.over_sampling_batch_size=8",
    "rollout.partial=true",
    "rollout.mask_older_tokens=true",
    "rollout.concurrency=8",
    "rollout.shards=1",
    "reward.name=tests.rewards_for_tests:parity",
    "perf.colocate=false",
    "perf.train_threads=1",
    "engines.rollout=sglang",
    "tracking.enabled=false",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, wordy_model: str, sglang_server: RolloutActor) -> OverSampled:
    """Half of the groups begin when the others are finished, and are cut short."""
    root = tmp_path_factory.mktemp("over")
    rows = [{"prompt": f"{number}+1=", "label": str(number + 1)} for number in range(24)]
    Path(root, "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = [f"model.path={wordy_model}", f"data.path={root}/prompts.jsonl"]
    chosen, _ = load_recipe(None, [*SETTINGS, *own, f'engines.sglang_urls=["{sglang_server.url()}"]'])
    sections: dict[str, Any] = {name: getattr(chosen, name) for name in Parameters.model_fields}
    asyncio.run(train(run="over", root=str(root), steps=STEPS, **sections))
    return OverSampled(runs.run_folder(str(root), "over"))


def test_requests_that_were_cut_short_have_ended_in_the_server(run: OverSampled, sglang_server: RolloutActor) -> None:
    cut = [row for step in range(STEPS) for row in run.rows(step) if row["finish_reason"] == "abort"]
    assert any(0 < len(row["response_token_ids"]) < LONGEST for row in cut)
    loads = httpx.get(f"{sglang_server.url()}/v1/loads").json()["loads"]
    assert [load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads] == [0]


def test_the_next_step_goes_on_with_each_response_where_it_stopped(run: OverSampled) -> None:
    assert sum(run.check_continued(step) for step in range(1, STEPS)) > 0
    rows = [row for step in range(1, STEPS) for row in run.rows(step)]
    mixed = [row for row in rows if row["weight_version_min"] < row["weight_version_max"]]
    assert mixed and all(0 in row["loss_mask"] for row in mixed)


def test_every_prompt_counts_once_and_the_run_verifies(run: OverSampled) -> None:
    steps = [manifest.load(run.folder, step) for step in range(STEPS)]
    assert [step.accounting["trained"] for step in steps] == [4] * STEPS
    assert all(step.accounting["interrupted"] for step in steps)
    (counts,) = epoch_accounting(run.folder).values()
    assert sum(count for name, count in counts.items() if name != "prompts") == counts["prompts"] == 24
    assert counts["trained"] == 4 * STEPS and verify(run.folder).faults == []


def test_the_server_says_how_much_of_the_prompts_it_had_cached(run: OverSampled) -> None:
    found = manifest.load(run.folder, 0).metrics
    assert 0 <= found["rollout/prefix_cache_hit_rate"] < 1 and "rollout/spec_accept_rate" not in found
