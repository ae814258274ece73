"""Weights as what changed: rebuilt bit for bit, and never from the wrong base."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from milepost.engines.digest import weights_digest
from milepost.engines.embedded_weights import read_folder
from milepost.engines.protocols import WeightSource, WeightVersion
from milepost.engines.weight_chain import DeltaMismatch, materialise, rebuild
from milepost.engines.weight_delta import decode, encode
from milepost.engines.weight_exports import FULL_EVERY, Exports
from milepost.engines.weight_folders import base_of, folder_bytes, full_folder
from milepost.storage import files

Tensors = dict[str, torch.Tensor]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 400), st.sampled_from([torch.bfloat16, torch.float32, torch.float64, torch.uint8]), st.integers(0)
)
def test_any_change_is_rebuilt_bit_for_bit(changed: int, dtype: torch.dtype, seed: int) -> None:
    old = (random(20, 20, seed=seed % 1000) * 50).abs().to(dtype)
    new = old.clone().view(-1)
    places = torch.randperm(400, generator=torch.Generator().manual_seed(seed % 1000))[:changed]
    new[places] = new[places] + 1
    mode, payload = encode(new.view(20, 20), old)
    assert torch.equal(decode(mode, payload, old).view(torch.uint8), new.view(20, 20).view(torch.uint8))


def test_nan_and_negative_zero_are_carried_as_they_are() -> None:
    old, new = torch.zeros(3), torch.tensor([float("nan"), -0.0, 0.0])
    mode, payload = encode(new, old)
    assert decode(mode, payload, old).view(torch.int32).tolist() == new.view(torch.int32).tolist()


def test_few_changes_are_overwritten_and_many_are_xored() -> None:
    old = random(400, 400)
    few, many = old.clone(), old * 1.01
    few[7, 7] += 1
    assert encode(few, old)[0] == "overwrite" and encode(many, old)[0] == "xor"
    assert len(encode(few, old)[1]) < 100


@pytest.fixture
def exports(model_dir: str) -> Exports:
    return Exports(model_dir, "float32")


@pytest.fixture
def tensors(model_dir: str) -> Tensors:
    return load_file(Path(model_dir, "model.safetensors"))


def exported(exports: Exports, tensors: Tensors, root: Path, step: int) -> WeightSource:
    """Version `step`, in which one number of the embedding is `step`."""
    changed = tensors["model.embed_tokens.weight"].clone()
    changed[0, 0] = step
    now = tensors | {"model.embed_tokens.weight": changed}
    uri = str(root / f"{step:06d}")
    digest = exports.write(now.items(), uri, "delta")
    assert digest == weights_digest(now.items())
    return exports.named(uri, WeightVersion(step, digest))


def test_only_what_changed_is_written_and_all_of_it_comes_back(
    exports: Exports, tensors: Tensors, tmp_path: Path
) -> None:
    first, second, third = (exported(exports, tensors, tmp_path, step) for step in range(3))
    assert first.base is None and (second.base, third.base) == (first.version, second.version)
    assert folder_bytes(third.uri) < folder_bytes(first.uri) / 50
    assert [row["name"] for row in files.read_json(f"{third.uri}/delta.json")["tensors"]] == [
        "model.embed_tokens.weight"
    ]
    assert weights_digest(rebuild(third.uri).items()) == third.version.digest
    assert weights_digest(rebuild(third.uri, rebuild(second.uri)).items()) == third.version.digest


def test_whoever_holds_another_version_is_given_everything(exports: Exports, tensors: Tensors, tmp_path: Path) -> None:
    first, _, third = (exported(exports, tensors, tmp_path, step) for step in range(3))
    assert base_of(third.uri) != first and full_folder(third.uri) == first.uri
    held = rebuild(first.uri)
    held["model.embed_tokens.weight"] = held["model.embed_tokens.weight"] + 1
    assert weights_digest(rebuild(third.uri, held).items()) == third.version.digest


def test_a_flipped_bit_in_a_change_is_an_error_and_not_a_weight(
    exports: Exports, tensors: Tensors, tmp_path: Path
) -> None:
    _, second = (exported(exports, tensors, tmp_path, step) for step in range(2))
    changes = Path(second.uri, "delta.bin")
    content = bytearray(changes.read_bytes())
    content[-1] ^= 1
    changes.write_bytes(bytes(content))
    with pytest.raises(DeltaMismatch, match=r"tensor 'model.embed_tokens.weight' of .* does not come out as written"):
        rebuild(second.uri)


def test_a_full_folder_comes_again_after_so_many_changes(exports: Exports, tensors: Tensors, tmp_path: Path) -> None:
    sources = [exported(exports, tensors, tmp_path, step) for step in range(FULL_EVERY + 1)]
    assert [source.version.step for source in sources if source.base is None] == [0, FULL_EVERY]


def test_a_version_written_again_at_its_place_does_not_build_on_itself(
    exports: Exports, tensors: Tensors, tmp_path: Path
) -> None:
    for step in (0, 1):
        exported(exports, tensors, tmp_path, step)
    again = exported(exports, tensors, tmp_path, 1)
    assert again.base is None and weights_digest(read_folder(again.uri).items()) == again.version.digest


def test_a_server_gets_a_full_folder_of_every_version_and_keeps_one(
    exports: Exports, tensors: Tensors, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    for step in range(3):
        source = exported(exports, tensors, tmp_path, step)
        folder = materialise(source, cache)
        assert weights_digest(read_folder(folder).items()) == source.version.digest
        assert (folder == source.uri) == (step == 0) and Path(folder, "tokenizer.json").exists()
    assert [path.name for path in cache.iterdir()] == [str(source.version)]
