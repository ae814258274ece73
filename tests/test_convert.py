"""A model goes from one format to the other and back with every bit, and what cannot be converted is refused."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from milepost.engines.conversion import COMPLETE, TRACKER, StoredModel, convert, megatron_state
from milepost.engines.tokenizer import load_tokenizer, write_character_tokenizer
from milepost.flows.convert import convert_model, stored_model

from .test_megatron_weights import VOCAB, save_model

pytestmark = pytest.mark.slow

IDS = torch.arange(VOCAB)[None]


@pytest.fixture(params=["llama with llama3 rope", "qwen2", "qwen3 tied"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[torch.nn.Module, Path]:
    """A random model of each family, and its folder."""
    folder = tmp_path / "model"
    write_character_tokenizer(str(folder), "0123456789+=")
    return save_model(request.param, folder), folder


def test_a_model_comes_back_from_megatrons_format_with_every_bit(
    model: tuple[torch.nn.Module, Path], tmp_path: Path
) -> None:
    before, folder = model
    given = convert_model(str(folder), str(tmp_path / "there"), "", form="megatron", dtype="", like="")
    found = convert_model(given["model"], str(tmp_path / "back"), "", form="hf", dtype="", like="")
    assert found["weights"] == given["weights"] == (tmp_path / "back" / COMPLETE).read_text()
    after = AutoModelForCausalLM.from_pretrained(found["model"]).eval()
    assert all(torch.equal(after.state_dict()[name], tensor) for name, tensor in before.state_dict().items())
    with torch.no_grad():
        assert torch.equal(after(IDS).logits, before(IDS).logits)
    assert load_tokenizer(found["model"]).encode("1+1=") == load_tokenizer(str(folder)).encode("1+1=")


@pytest.fixture
def llama(tmp_path: Path) -> str:
    folder = tmp_path / "llama"
    write_character_tokenizer(str(folder), "0123456789+=")
    save_model("llama tied", folder)
    return str(folder)


def test_weights_of_megatron_lm_are_converted_like_a_model_that_is_named(llama: str, tmp_path: Path) -> None:
    there, back = tmp_path / "there", tmp_path / "back"
    digest = convert(StoredModel(llama, "float32"), str(there), "megatron", "float32")
    (there / "config.json").unlink()
    (there / COMPLETE).unlink()
    (there / "release").rename(there / "iter_0000012")
    (there / TRACKER).write_text("12\n")
    with pytest.raises(ValueError, match="has no config.json: name the Hugging Face model of its weights with --like"):
        stored_model(str(there), "", "")
    found = convert_model(str(there), str(back), "", form="hf", dtype="", like=llama)
    assert (found["dtype"], found["weights"]) == ("float32", digest)
    assert convert_model(llama, str(tmp_path / "small"), "", form="hf", dtype="bfloat16", like="")["weights"] != digest
    small = AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    assert small.dtype == torch.bfloat16


def test_weights_that_are_not_those_of_the_folder_leave_nothing(llama: str, tmp_path: Path) -> None:
    convert(StoredModel(llama, "float32"), str(tmp_path / "there"), "megatron", "float32")
    (tmp_path / "there" / COMPLETE).write_text("another")
    with pytest.raises(ValueError, match="release holds weights .*, not another: restore it from a copy"):
        convert_model(str(tmp_path / "there"), str(tmp_path / "back"), "", form="hf", dtype="", like="")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["llama", "there"]


def test_what_cannot_be_converted_is_refused(llama: str, tmp_path: Path) -> None:
    def refused(match: str, source: str = llama, out: str = "new", form: str = "hf", dtype: str = "", like: str = ""):
        with pytest.raises((ValueError, LookupError, FileExistsError, FileNotFoundError), match=match):
            convert_model(source, str(tmp_path / out), str(tmp_path), form=form, dtype=dtype, like=like)

    refused("--to 'onnx' is not known: give hf or megatron", form="onnx")
    refused("--dtype 'int8' is not known: give float32 or bfloat16", dtype="int8")
    refused("llama already exists: name a folder that is not there yet", out="llama")
    refused("--like is for weights in Megatron's format", like=llama)
    refused("checkpoint 'nothing' does not exist", source="nothing")
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / TRACKER).write_text("3")
    refused("names 'iter_0000003' as its newest state, which is not there", source=str(tmp_path / "begun"))


def test_a_checkpoint_of_a_run_is_no_folder_of_megatron_lms(tmp_path: Path) -> None:
    (tmp_path / ".metadata").touch()
    assert megatron_state(tmp_path) == tmp_path
    (tmp_path / "checkpoint.json").touch()
    assert megatron_state(tmp_path) is None
