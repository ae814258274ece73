"""Where the weights of a model can be stored, and their conversion from there; none of it needs running engines."""

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from milepost.storage import files
from milepost.storage.checkpoints import MANIFEST

Dtype = Literal["float32", "bfloat16"]
Form = Literal["hf", "megatron"]

TRACKER, RELEASE = "latest_checkpointed_iteration.txt", "release"
COMPLETE = ".complete"  # written last, with the digest of the weights
_INDEX = ".metadata"  # of one state in Megatron's distributed format


@dataclass(frozen=True)
class StoredModel:
    """Weights of `dtype` in Megatron's format in `state`, or else those of `model_dir`, which has all else of a model.

    `digest` is what they must be, where that is known.
    """

    model_dir: str
    dtype: Dtype
    state: str = ""
    digest: str = ""


def convert(source: StoredModel, out: str, form: Form, dtype: Dtype) -> str:
    """Write the weights of `source` at `out`, and return their digest; after an error nothing is there."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron's, of what it does without here
        from milepost.engines.megatron_folder import write_model

        return write_model(source, out, form, dtype)


def megatron_state(folder: Path) -> Path | None:
    """Where the newest state is in a folder of Megatron-LM's; None for what is none, as a checkpoint of a run."""
    if (folder / TRACKER).is_file():
        newest = (folder / TRACKER).read_text().strip()
        return folder / (f"iter_{int(newest):07d}" if newest.isdigit() else newest)
    return folder if (folder / _INDEX).is_file() and not (folder / MANIFEST).exists() else None


def stored_dtype(model_dir: str) -> Dtype:
    """The type of the weights by config.json; float32 for one that is not trained in, which loses nothing."""
    config = files.read_json(files.join(model_dir, "config.json"))
    found = config.get("dtype") or config.get("torch_dtype")
    return "bfloat16" if found == "bfloat16" else "float32"
