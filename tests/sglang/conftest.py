"""The interpreter that has SGLang, without which these tests are skipped, and rollout engines of both kinds."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from milepost.engines.rollout_actor import RolloutActor
from milepost.engines.rollout_start import start_rollout
from milepost.engines.tiny_model import write_tiny_model
from milepost.engines.tokenizer import load_tokenizer, write_character_tokenizer
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


@pytest.fixture(scope="session")
def wordy_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random Qwen3 over a thousand characters: it ends a response in one of a thousand tokens."""
    folder = str(tmp_path_factory.mktemp("wordy"))
    write_character_tokenizer(folder, "0123456789+-*=" + "".join(map(chr, range(0x4E00, 0x4E00 + 1000))))
    vocabulary = load_tokenizer(folder).vocab_size
    write_tiny_model(folder, vocab_size=vocabulary, hidden=32, layers=2, heads=4, kv_heads=2, seed=0)
    return folder


@pytest.fixture(scope="session")
def sglang_server(ray_cluster: None, wordy_model: str, sglang_python: str) -> Iterator[RolloutActor]:
    """A server with a context of 512 tokens, for whoever brings the weights that it is to have."""
    engines = EnginesSection(
        rollout="sglang", sglang_python=sglang_python, sglang={"max_total_tokens": 4096}, rollout_threads=1
    )
    actor = start_rollout("server", 0, Parameters(engines=engines, model=ModelSection(context_length=512)), wordy_model)
    yield actor
    actor.close()
