"""What many tests share: one state folder, one Prefect server and one Ray cluster for the whole session."""

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .bench.made_run import MadeRun


@pytest.fixture(scope="session", autouse=True)
def state_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Tests keep out of the state of whoever runs them."""
    folder = tmp_path_factory.mktemp("milepost-home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MILEPOST_HOME", str(folder))
        yield folder


@pytest.fixture(scope="session")
def prefect_server(state_folder: Path) -> Iterator[str]:
    from milepost.flows.services import prefect_api

    with prefect_api(say=lambda text: None, console_level="CRITICAL") as url:
        yield url


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    from milepost.engines.fleet import joined_cluster

    with joined_cluster(None):
        yield


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random Qwen3 of 30,000 parameters over digits and operators."""
    from milepost.engines.tiny_model import write_tiny_model
    from milepost.engines.tokenizer import load_tokenizer, write_character_tokenizer

    folder = str(tmp_path_factory.mktemp("model"))
    write_character_tokenizer(folder, "0123456789+-*=")
    vocabulary = load_tokenizer(folder).vocab_size
    write_tiny_model(folder, vocab_size=vocabulary, hidden=32, layers=2, heads=4, kv_heads=2, seed=0)
    return folder


@pytest.fixture(scope="session")
def three_steps(tmp_path_factory: pytest.TempPathFactory) -> "MadeRun":
    """A run of three steps, made without engines, for tests to copy."""
    from .bench.made_run import make_run

    return make_run(str(tmp_path_factory.mktemp("three")), 3)


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What Milepost logs, once each, whatever servers and engines of this process made of logging's configuration."""
    logger = logging.getLogger("milepost")
    for name, known in logging.Logger.manager.loggerDict.items():
        if name.startswith("milepost.") and isinstance(known, logging.Logger):
            known.disabled = False
    with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.WARNING, logger="milepost"):
        patch.setattr(logger, "handlers", [caplog.handler])
        patch.setattr(logger, "propagate", False)
        yield caplog


Prompts = Callable[..., str]


@pytest.fixture
def prompts(tmp_path: Path) -> Prompts:
    """Writes a prompt set of sums and returns its path."""

    def write(count: int = 16, *, name: str = "prompts.jsonl") -> str:
        rows = [{"prompt": f"{number}+1=", "label": str(number + 1)} for number in range(count)]
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write
