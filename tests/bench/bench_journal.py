"""What durability costs: the time to store a step's tables, commits and manifest, and to digest its weights.

python tests/bench/bench_journal.py [fake|smollm2]     (smollm2 takes three minutes)

A run is trained; then what its steps stored is stored once more elsewhere, under a lease, and timed by stage.
"""

import asyncio
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from bench_orchestration import fake_parameters
from safetensors import safe_open

from milepost.engines.digest import weights_digest
from milepost.flows.gym_data import make_reasoning_gym
from milepost.flows.recipe import load_recipe
from milepost.flows.services import prefect_api
from milepost.flows.train import train
from milepost.storage import manifest, runs
from milepost.storage.journal import Commit, Slot, StepStore
from milepost.storage.lease import hold
from milepost.storage.parameters import Parameters
from milepost.storage.runs import RunFolder
from milepost.storage.schema import SCHEMAS
from milepost.storage.tables import read_table


def smollm2_parameters(folder: Path) -> Parameters:
    prompts = str(folder / "prompts.parquet")
    make_reasoning_gym("chain_sum", 200, 0, prompts)
    return load_recipe("smollm2-chain-sum", [f"data.path={prompts}", "tracking.enabled=false"])[0]


def store_again(commit: Commit, store: StepStore) -> float:
    """Seconds to store what a stage left, as the stage did it."""
    tables = {name: read_table(ref) for name, ref in commit.tables.items()}
    slot = Slot.parse(commit.slot)
    started = time.perf_counter()
    key = store.key(slot, list(commit.tables.values()), {})
    assert store.committed(slot, key) is None
    refs = {
        name: store.write(f"{commit.slot}-{name}", table, SCHEMAS[commit.tables[name].schema])
        for name, table in tables.items()
    }
    store.commit(slot, key, refs, record=commit.record, started=time.monotonic())
    return time.perf_counter() - started


def close_again(folder: RunFolder, step: int, store: StepStore, copy: RunFolder) -> float:
    closed = manifest.load(folder, step)
    started = time.perf_counter()
    previous = manifest.manifest_digest(copy, step - 1)
    entries = manifest.commit_entries(store.commits())
    manifest.publish(copy, replace(closed, previous=previous, commits=entries, fence=store.fence))
    return time.perf_counter() - started


def digest_seconds(folder: RunFolder) -> float:
    """Seconds to digest the weights twice, as the trainer that exports them and the engine that loads them do."""
    paths = sorted(Path(folder.weights(max(manifest.finished_steps(folder)) + 1)).glob("*.safetensors"))
    if not paths:
        return 0.0
    with safe_open(paths[0], "pt") as file:
        tensors = [(name, file.get_tensor(name)) for name in file.keys()]
    started = time.perf_counter()
    weights_digest(tensors)
    return 2 * (time.perf_counter() - started)


def main(engines: str) -> None:
    stages: dict[str, list[float]] = {}
    steps, wall = (20, 0.0) if engines == "fake" else (2, 0.0)
    with tempfile.TemporaryDirectory() as root:
        parameters = fake_parameters(Path(root)) if engines == "fake" else smollm2_parameters(Path(root))
        sections = {name: getattr(parameters, name) for name in Parameters.model_fields}
        with prefect_api(say=lambda text: None, console_level="CRITICAL"):
            asyncio.run(train(run="run", root=root, steps=steps, **sections))
        folder, copy = runs.run_folder(root, "run"), runs.run_folder(root, "copy")
        with hold(copy) as lease:
            for step in range(steps):
                wall += sum(value for name, value in manifest.load(folder, step).metrics.items() if "time/" in name)
                store = StepStore(copy.step(step), "copy", step, lease.fence)
                for commit in StepStore(folder.step(step), "run", step).commits():
                    stages.setdefault(commit.slot.split("-")[0], []).append(store_again(commit, store))
                stages.setdefault("manifest", []).append(close_again(folder, step, store, copy))
        digests = digest_seconds(folder)
    total = sum(map(sum, stages.values())) / steps + digests
    print("| stage | median ms | commits |\n|---|---|---|")
    for stage, seconds in stages.items():
        print(f"| {stage} | {1e3 * statistics.median(seconds):.1f} | {len(seconds)} |")
    print(f"weights are digested twice a step in {digests:.2f} s together")
    print(f"{total:.3f} s of {wall / steps:.2f} s a step: {total * steps / wall:.1%}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "fake")
