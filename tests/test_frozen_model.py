"""The weights of a run that trains nothing have the name that a trainer of the same folder would give them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from milepost.engines.digest import weights_digest
from milepost.engines.embedded_weights import live_tensors
from milepost.engines.fake_rank import FakeRank
from milepost.engines.frozen_model import FrozenModel, frozen_model
from milepost.storage.parameters import EnginesSection, Parameters, SyncSection


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_digest_is_that_of_the_model_as_engines_hold_it(tmp_path: Path, model_dir: str, dtype: str) -> None:
    loaded: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, dtype))
    found = FrozenModel(model_dir, dtype).weights(str(tmp_path / "000000"), 0)
    assert (found.version.step, found.version.digest) == (0, weights_digest(live_tensors(loaded).items()))


def test_a_tied_output_layer_that_is_stored_beside_the_embedding_is_left_out(tmp_path: Path, model_dir: str) -> None:
    twice = tmp_path / "twice"
    plain = FrozenModel(model_dir, "float32").weights(str(twice), 0)
    stored = load_file(twice / "model.safetensors")
    embedding = stored["model.embed_tokens.weight"]
    save_file(stored | {"lm_head.weight": embedding.clone()}, twice / "model.safetensors", metadata={"format": "pt"})
    assert FrozenModel(str(twice), "float32").weights(str(tmp_path / "out"), 0).version == plain.version


def test_fake_engines_are_given_what_a_fake_trainer_begins_with(tmp_path: Path, model_dir: str) -> None:
    chosen = Parameters(engines=EnginesSection(train="none", rollout="fake"))
    first = FakeRank(0, 1, None).weights(str(tmp_path / "a"), 0)
    assert frozen_model(model_dir, chosen).weights(str(tmp_path / "b"), 0).version == first.version


def test_weights_that_nobody_trains_are_not_sent(model_dir: str) -> None:
    with pytest.raises(ValueError, match="no trainer could send anything by sync.transport='tensor': use 'disk'"):
        FrozenModel(model_dir, "float32").push([], 0, SyncSection(transport="tensor"))
