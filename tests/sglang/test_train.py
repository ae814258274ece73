"""The whole loop on Megatron and a real SGLang server behind the router; the server is killed in the middle."""

import asyncio
import json
import threading
import time
from typing import Any

import numpy as np
import psutil
import pytest

from milepost.flows.recipe import load_recipe
from milepost.flows.sql import as_rows, query
from milepost.flows.train import train
from milepost.storage import manifest, runs
from milepost.storage.parameters import Parameters
from milepost.storage.runs import RunFolder
from milepost.storage.tables import TableRef, read_table

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect_server", "ray_cluster")]

STEPS = 3
SETTINGS = [
    "data.apply_chat_template=false",
    "data.rollout_batch_size=4",
    "data.n_samples_per_prompt=4",
    "algorithm.num_steps_per_rollout=2",
    "model.context_length=32",
    "rollout.max_new_tokens=6",
    "rollout.temperature=0.8",
    "rollout.shards=2",
    "reward.name=tests.rewards_for_tests:parity",
    "optimizer.lr=1e-3",
    "perf.train_threads=1",
    "engines.rollout=sglang",
    "engines.rollout_threads=1",
    'engines.sglang={"max_total_tokens": 2048}',
    "tracking.enabled=false",
]


def servers() -> dict[int, list[str]]:
    """SGLang's processes below this one, and their command lines."""
    family = {one.pid: command_line(one) for one in psutil.Process().children(recursive=True)}
    return {pid: words for pid, words in family.items() if "sglang" in " ".join(words)}


def command_line(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:  # it has just ended, if nobody has asked how yet
        return []


def kill_server_after(folder: RunFolder, step: int, others: set[int]) -> None:
    while step not in manifest.finished_steps(folder):
        time.sleep(0.05)
    (server,) = [pid for pid, words in servers().items() if pid not in others and "sglang.launch_server" in words]
    psutil.Process(server).kill()


@pytest.fixture(scope="module")
def others() -> set[int]:
    """Servers that other tests have started."""
    return set(servers())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, model_dir: str, sglang_python: str, others: set[int]) -> RunFolder:
    root = tmp_path_factory.mktemp("sglang")
    rows = [{"prompt": f"{number}+1=", "label": str(number + 1)} for number in range(8)]
    (root / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = [f"model.path={model_dir}", f"data.path={root}/prompts.jsonl", f"engines.sglang_python={sglang_python}"]
    chosen, _ = load_recipe(None, [*SETTINGS, *own])
    sections: dict[str, Any] = {name: getattr(chosen, name) for name in Parameters.model_fields}
    folder = runs.run_folder(str(root), "sglang")
    killer = threading.Thread(target=kill_server_after, args=(folder, 0, others), daemon=True)
    killer.start()
    asyncio.run(train(run="sglang", root=str(root), steps=STEPS, **sections))
    assert not killer.is_alive()
    return folder


def test_every_step_is_done_though_the_server_was_killed_and_no_process_is_left(
    run: RunFolder, others: set[int]
) -> None:
    assert [manifest.load(run, step).accounting["trained"] for step in range(STEPS)] == [4] * STEPS
    assert set(servers()) <= others


def test_every_sample_was_made_by_the_weights_of_its_step(run: RunFolder) -> None:
    asked = "select distinct step, weight_version_min, weight_version_max from rollouts order by 1"
    _, rows = as_rows(query([run], asked))
    assert [tuple(row) for row in rows] == [(step, step, step) for step in range(STEPS)]


def test_the_trainer_recomputes_the_log_probabilities_that_the_server_reported(run: RunFolder) -> None:
    for step in range(STEPS):
        entry = next(item for item in manifest.load(run, step).commits if item["slot"] == "optimize-r0")
        for _, ref in sorted(entry["tables"].items()):
            batch = read_table(TableRef(**ref))
            rollout, trainer = (
                np.concatenate([np.array(row) for row in batch[name].to_pylist()])
                for name in ("rollout_logprobs", "old_logprobs")
            )
            assert len(rollout) and np.abs(rollout - trainer).max() < 1e-4
