"""Rollout engines and applications as Ray actors, driven as a run drives them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from milepost.engines.app_server import start_app
from milepost.engines.digest import weights_digest
from milepost.engines.protocols import WeightSource, WeightVersion
from milepost.engines.rollout_actor import RolloutActor, connect_rollout_engine, start_rollout_engine
from milepost.engines.served_engine import EmbeddedEngine, FakeEngine
from milepost.engines.tiny_model import write_tiny_model
from milepost.engines.tokenizer import write_character_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = str(tmp_path_factory.mktemp("model"))
    write_tiny_model(directory, vocab_size=32, hidden=32, layers=2, heads=4, kv_heads=2, seed=1)
    write_character_tokenizer(directory, "0123456789+= abcdef")
    return directory


@pytest.fixture(scope="module")
def engine(model_dir: str) -> Iterator[RolloutActor]:
    actor = start_rollout_engine(
        "run",
        0,
        engine_class=EmbeddedEngine,
        timeout_seconds=120,
        model_dir=model_dir,
        host="127.0.0.1",
        threads=1,
        max_running_requests=8,
        context_length=128,
        dtype="float32",
    )
    yield actor
    actor.close()


def generate(url: str, **sampling: Any) -> dict[str, Any]:
    body = {"input_ids": [4, 5, 6], "sampling_params": {"max_new_tokens": 20, "ignore_eos": True, **sampling}}
    answer: dict[str, Any] = httpx.post(f"{url}/generate", json=body, timeout=60, trust_env=False).json()
    return answer


def write_weights(model_dir: str, directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> str:
    """A folder of changed weights; the digest of its content."""
    tensors = load_file(Path(model_dir) / "model.safetensors")
    change(tensors)
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    return weights_digest(tensors.items())


def test_an_engine_starts_at_version_zero_with_the_digest_of_its_files(engine: RolloutActor, model_dir: str) -> None:
    tensors = load_file(Path(model_dir) / "model.safetensors")
    assert engine.weight_version() == WeightVersion(0, weights_digest(tensors.items()))
    assert generate(engine.url())["meta_info"]["weight_version"] == str(engine.weight_version())


def test_loaded_weights_are_stamped_on_samples_and_change_them(
    engine: RolloutActor, model_dir: str, tmp_path: Path
) -> None:
    before = generate(engine.url(), sampling_seed=1)["output_ids"]
    digest = write_weights(model_dir, tmp_path, lambda tensors: tensors["model.norm.weight"].mul_(-3.0))
    version = engine.load_weights(WeightSource(str(tmp_path), WeightVersion(7, digest)))
    assert version == engine.weight_version() == WeightVersion(7, digest)
    answer = generate(engine.url(), sampling_seed=1)
    assert answer["meta_info"]["weight_version"] == str(version)
    assert answer["output_ids"] != before
    original = write_weights(model_dir, tmp_path, lambda tensors: None)
    engine.load_weights(WeightSource(str(tmp_path), WeightVersion(8, original)))
    assert generate(engine.url(), sampling_seed=1)["output_ids"] == before


def test_weights_with_another_digest_or_tensors_are_refused_and_nothing_changes(
    engine: RolloutActor, model_dir: str, tmp_path: Path
) -> None:
    before = (engine.weight_version(), generate(engine.url(), sampling_seed=1)["output_ids"])
    digest = write_weights(model_dir, tmp_path, lambda tensors: tensors["model.norm.weight"].mul_(2.0))
    with pytest.raises(ValueError, match="have digest .*, expected ffff"):
        engine.load_weights(WeightSource(str(tmp_path), WeightVersion(9, "f" * 32)))
    write_weights(model_dir, tmp_path, lambda tensors: tensors.__delitem__("model.norm.weight"))
    with pytest.raises(ValueError, match=r"missing \['model.norm.weight'\]"):
        engine.load_weights(WeightSource(str(tmp_path), WeightVersion(9, digest)))
    write_weights(model_dir, tmp_path, lambda tensors: tensors.update(more=torch.zeros(1)))
    with pytest.raises(ValueError, match=r"unknown \['more'\]"):
        engine.load_weights(WeightSource(str(tmp_path), WeightVersion(9, digest)))
    assert before == (engine.weight_version(), generate(engine.url(), sampling_seed=1)["output_ids"])


def test_a_torn_weights_file_is_refused(engine: RolloutActor, model_dir: str, tmp_path: Path) -> None:
    data = (Path(model_dir) / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match="is damaged"):
        engine.load_weights(WeightSource(str(tmp_path), engine.weight_version()))


def test_a_running_engine_is_found_by_run_and_index_and_paused_from_there(engine: RolloutActor) -> None:
    again = connect_rollout_engine("run", 0)
    again.pause("retract")
    again.release_memory()
    again.resume_memory()
    again.resume()
    assert len(generate(again.url())["output_ids"]) == 20
    with pytest.raises(LookupError, match="no engine called 'run/rollout-5'"):
        connect_rollout_engine("run", 5).url()


def test_an_engine_that_cannot_start_says_why_in_its_own_words(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no config.json: give a Hugging Face model folder"):
        start_rollout_engine("bad", 0, engine_class=EmbeddedEngine, timeout_seconds=120, model_dir=str(tmp_path))


def test_a_fake_engine_takes_the_same_calls_and_reads_no_model() -> None:
    fake = start_rollout_engine("fake", 0, engine_class=FakeEngine, timeout_seconds=60, model_dir="", threads=1)
    version = WeightVersion(3, "ab" * 16)
    fake.pause("abort")
    assert fake.load_weights(WeightSource("nowhere", version)) == fake.weight_version() == version
    fake.resume()
    assert generate(fake.url())["meta_info"]["weight_version"] == str(version)
    url = fake.url()
    fake.close()
    with pytest.raises(httpx.ConnectError, match="refused"):
        httpx.get(f"{url}/health", trust_env=False)


def test_any_application_is_served_by_the_name_of_its_factory() -> None:
    app = start_app("app", "fastapi:FastAPI", {"title": "Some application"})
    document = httpx.get(f"{app.url()}/openapi.json", trust_env=False).json()
    assert document["info"]["title"] == "Some application"
    app.close()
    with pytest.raises(LookupError, match="cannot import 'nowhere'"):
        start_app("app-2", "nowhere:build", {})
