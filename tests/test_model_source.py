import importlib
import json
import os
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from milepost.engines.digest import weights_digest
from milepost.engines.model_source import resolve_model
from milepost.engines.tiny_model import Family, write_tiny_model
from milepost.engines.tokenizer import Tokenizer, load_tokenizer, write_character_tokenizer

pytestmark = pytest.mark.slow

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
WORDS = ["<unk>", "<s>", "</s>", *map(chr, range(33, 127)), "\u0120", "\u010a", "ab", "\u0120ab"]


def write_model(directory: Path, *, family: Family = "qwen3", seed: int = 1) -> str:
    write_tiny_model(str(directory), vocab_size=32, hidden=16, layers=1, heads=2, kv_heads=1, seed=seed, family=family)
    write_character_tokenizer(str(directory), "0123456789+= \nabc")
    return str(directory)


def write_gguf(file: Path) -> None:
    """A one-layer llama of random weights with a byte-level tokenizer and a chat template."""
    random = np.random.default_rng(0)
    file.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_name("Tiny")
    writer.add_context_length(64)
    writer.add_embedding_length(16)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(WORDS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(WORDS)
    writer.add_token_types([3, 3, 3] + [1] * (len(WORDS) - 3))
    writer.add_token_merges(["a b", "\u0120 ab"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    shapes = {"token_embd": (len(WORDS), 16), "output_norm": (16,), "blk.0.attn_norm": (16,), "blk.0.ffn_norm": (16,)}
    shapes |= {f"blk.0.attn_{name}": (16, 16) for name in ("q", "k", "v", "output")}
    shapes |= {"blk.0.ffn_gate": (32, 16), "blk.0.ffn_up": (32, 16), "blk.0.ffn_down": (16, 32)}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", random.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(file)
    return file


def test_a_hugging_face_folder_is_used_as_it_is(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "model")
    assert resolve_model(directory, str(tmp_path / "cache")) == directory
    assert not (tmp_path / "cache").exists()


def test_a_gguf_file_becomes_a_folder_once(gguf_file: Path, tmp_path: Path) -> None:
    folder = resolve_model(str(gguf_file), str(tmp_path))
    tensors = load_file(Path(folder) / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model(torch.tensor([[5, 6]])).logits.shape == (1, 2, len(WORDS))
    stamp = os.stat(Path(folder) / "model.safetensors").st_mtime_ns
    assert resolve_model(str(gguf_file), str(tmp_path)) == folder
    assert os.stat(Path(folder) / "model.safetensors").st_mtime_ns == stamp
    assert [entry.name for entry in tmp_path.iterdir()] == [Path(folder).name]


def test_the_folder_of_a_gguf_file_keeps_its_chat_template(gguf_file: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(resolve_model(str(gguf_file), str(tmp_path)))
    ids = tokenizer.render([{"role": "user", "content": "1 ab"}])
    assert tokenizer.decode(ids) == "user:1 ab\na:"
    assert tokenizer.render("1 ab") == ids
    assert tokenizer.eos_ids == {2}


def test_a_package_gives_its_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "ships_one" / "models" / "tiny.gguf")
    (tmp_path / "ships_one" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    found = {
        resolve_model(path, str(tmp_path / "cache"))
        for path in ("package:ships_one", "package:ships_one/models/tiny.gguf")
    }
    assert len(found) == 1 and "ships_one" not in sys.modules
    with pytest.raises(LookupError, match=r"has no file 'tiny.gguf', did you mean 'models/tiny.gguf'"):
        resolve_model("package:ships_one/tiny.gguf", str(tmp_path / "cache"))
    (tmp_path / "ships_one" / "other.gguf").touch()
    with pytest.raises(LookupError, match="ships 2 .gguf files: give one of .*package:ships_one/other.gguf"):
        resolve_model("package:ships_one", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("config.json", "has no config.json"),
        ("model.safetensors", "has no weights"),
        ("tokenizer.json", "has no tokenizer"),
    ],
)
def test_an_incomplete_folder_is_refused_with_what_it_lacks(tmp_path: Path, missing: str, message: str) -> None:
    directory = write_model(tmp_path)
    (tmp_path / missing).unlink()
    with pytest.raises(ValueError, match=message):
        resolve_model(directory, "unused")


def test_weights_that_were_copied_in_part_are_refused_with_the_file(tmp_path: Path) -> None:
    directory, weights = write_model(tmp_path), tmp_path / "model.safetensors"
    names = list(load_file(weights))
    os.truncate(weights, weights.stat().st_size - 1)
    with pytest.raises(ValueError, match=r"model.safetensors' is damaged \(.*\): copy it again"):
        resolve_model(directory, "unused")
    index = tmp_path / "model.safetensors.index.json"
    save_file({}, tmp_path / "empty.safetensors")
    for file, what in [("other.safetensors", "is not there"), ("empty.safetensors", "has no weight 'lm_head.weight'")]:
        index.write_text(json.dumps({"weight_map": dict.fromkeys(names, file) | {"lm_head.weight": file}}))
        with pytest.raises(ValueError, match=f"{file}' {what}"):
            resolve_model(directory, "unused")


def test_what_is_not_there_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_text("weights")
    (tmp_path / "fake.gguf").write_text("not a model")
    for path, error, message in [
        ("", ValueError, "no model is given"),
        ("Qwen/Qwen3-0.6B", ValueError, "is not a local folder: download it first"),
        (str(tmp_path / "modle.bin"), ValueError, "does not exist, did you mean 'model.bin'"),
        (str(tmp_path / "model.bin"), ValueError, "is not a .gguf file"),
        (str(tmp_path / "fake.gguf"), ValueError, "is not a GGUF file"),
        ("package:not_installed", LookupError, "names package 'not_installed', which is not installed"),
    ]:
        with pytest.raises(error, match=message):
            resolve_model(path, str(tmp_path / "cache"))


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_a_character_tokenizer_round_trips_beside_any_model(tmp_path: Path, family: Family) -> None:
    tokenizer = load_tokenizer(write_model(tmp_path, family=family))
    ids = tokenizer.encode("12 + 3=\nabc")
    assert ids == [4, 5, 15, 13, 15, 6, 14, 16, 17, 18, 19]
    assert tokenizer.decode([*ids, 1, 0]) == "12 + 3=\nabc"
    assert tokenizer.decode([4, 1], skip_special_tokens=False) == "1<eos>"
    assert (tokenizer.vocab_size, tokenizer.eos_ids) == (20, {1})


def test_a_tokenizer_without_chat_template_takes_strings_and_refuses_messages(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_model(tmp_path))
    assert tokenizer.render("1+2=") == tokenizer.encode("1+2=")
    with pytest.raises(ValueError, match="no chat template to render messages with: give prompts as strings"):
        tokenizer.render([{"role": "user", "content": "1"}])


def with_template(folder: Path, template: str) -> Tokenizer:
    model = write_model(folder)
    Path(model, "chat_template.jinja").write_text(template)
    return load_tokenizer(model)


def test_tools_are_in_the_prompt_where_the_chat_template_shows_them(tmp_path: Path) -> None:
    shows = "{% for tool in tools or [] %}{{ tool.name }}=\n{% endfor %}{{ messages[0].content }}"
    tokenizer = with_template(tmp_path / "a", shows)
    assert tokenizer.decode(tokenizer.render("1+2", [{"name": "abc"}])) == "abc=\n1+2"
    assert tokenizer.decode(tokenizer.render("1+2")) == "1+2"
    silent = with_template(tmp_path / "b", "{{ messages[0].content }}")
    with pytest.raises(ValueError, match="the chat template does not show tools to the model: take them out"):
        silent.render("1+2", [{"name": "abc"}])


@pytest.mark.parametrize("template", ["{{ raise_exception('no such role') }}", "{{ messages[0].content + '1' }}"])
def test_what_a_chat_template_refuses_is_a_sentence(tmp_path: Path, template: str) -> None:
    with pytest.raises(ValueError, match="the chat template refuses it: "):
        with_template(tmp_path, template).render([{"role": "user", "content": None}])


def test_repeated_characters_and_missing_tokenizers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"characters holds \['a'\] more than once"):
        write_character_tokenizer(str(tmp_path), "aba")
    with pytest.raises(ValueError, match="holds no tokenizer"):
        load_tokenizer(str(tmp_path))


def test_a_tiny_model_depends_on_its_seed_alone(tmp_path: Path) -> None:
    digests = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        torch.manual_seed(hash(name) % 100)
        write_model(tmp_path / name, seed=seed)
        digests.append(weights_digest(load_file(tmp_path / name / "model.safetensors").items()))
    assert digests[0] == digests[1] != digests[2]
    with pytest.raises(ValueError, match="heads must divide hidden"):
        write_tiny_model(str(tmp_path), vocab_size=8, hidden=10, layers=1, heads=4, kv_heads=2, seed=0)
