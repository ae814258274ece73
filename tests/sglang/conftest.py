"""The interpreter that has SGLang, without which these tests are skipped, and rollout engines of both kinds."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from milepost.engines.rollout_actor import RolloutActor
from milepost.engines.rollout_start import start_rollout
from milepost.storage.parameters import EnginesSection, ModelSection, Parameters

INSTALLED = Path(__file__).parents[2] / ".venv-sglang" / ".installed"


@pytest.fixture(scope="session")
def sglang_python() -> str:
    found = os.environ.get("MILEPOST_SGLANG_PYTHON") or (INSTALLED.exists() and str(INSTALLED.parent / "bin/python"))
    if not found:
        pytest.skip("SGLang is not installed in .venv-sglang: run `make sglang`")
    return found


@pytest.fixture(scope="module", params=["embedded", "sglang"])
def engine(request: pytest.FixtureRequest, ray_cluster: None, model_dir: str) -> Iterator[RolloutActor]:
    """A running engine with the weights of `model_dir` and a context of 512 tokens."""
    python = request.getfixturevalue("sglang_python") if request.param == "sglang" else ""
    engines = EnginesSection(
        rollout=request.param,
        sglang_python=python,
        sglang={"max_total_tokens": 4096} if python else {},
        rollout_threads=1,
        max_running_requests=8,
    )
    parameters = Parameters(engines=engines, model=ModelSection(context_length=512))
    actor = start_rollout(f"conformance-{request.param}", 0, parameters, model_dir)
    yield actor
    actor.close()
