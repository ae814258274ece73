"""How much of the scoring is hidden behind generation: steps where both cost the same, on the fake engines.

python tests/bench/bench_overlap.py [SECONDS]
"""

import statistics
import sys
import tempfile
from pathlib import Path

from bench_orchestration import fake_parameters, timed

from milepost.engines.fleet import connect_fleet, fleet, joined_cluster
from milepost.flows.iteration import iteration
from milepost.flows.services import prefect_api
from milepost.flows.start import begin_run
from milepost.storage import runs
from milepost.storage.parameters import Parameters

import asyncio  # isort: skip

STEPS = 3
TOKENS = 8
SAMPLES = 64
AT_A_TIME = 16  # requests of the engine: a step is generated in as many waves as it has shards
WORKERS = 2


def measure(name: str, root: str, parameters: Parameters, *, generating: float, grading: float) -> float:
    """Median seconds of a step whose samples take so long to generate, and so long to grade, all together."""
    reward = parameters.reward.model_copy(update={"options": {"seconds": grading * WORKERS / SAMPLES}})
    chosen = parameters.model_copy(update={"reward": reward})
    launched = begin_run(root, runs.run_folder(root, name), STEPS, chosen, fence=0)
    delay = {"delay_seconds": generating * AT_A_TIME / SAMPLES / TOKENS}
    with fleet(name, chosen, chosen.model.path, engine_options=delay):
        return statistics.median(asyncio.run(timed(launched, connect_fleet(name, chosen), root, STEPS, iteration)))


def main(seconds: float) -> None:
    with tempfile.TemporaryDirectory() as folder, joined_cluster(None):
        parameters = fake_parameters(Path(folder))
        updates = {
            "reward": parameters.reward.model_copy(update={"name": "sleepy_reward:sleepy", "workers": WORKERS}),
            "engines": parameters.engines.model_copy(update={"max_running_requests": AT_A_TIME}),
        }
        parameters = parameters.model_copy(update=updates)
        with prefect_api(say=lambda text: None, console_level="CRITICAL"):
            generation = measure("generation", folder, parameters, generating=seconds, grading=0.0)
            grading = measure("grading", folder, parameters, generating=0.0, grading=seconds)
            both = measure("both", folder, parameters, generating=seconds, grading=seconds)
    longer = max(generation, grading)
    print(f"a step of {SAMPLES} samples in 4 shards: generation {generation:.2f} s, grading {grading:.2f} s")
    print(f"both together {both:.2f} s: {both / longer:.2f} of the longer one")


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 8.0)
