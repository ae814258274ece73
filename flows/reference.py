"""The model of a run's reference policy, and whether the trained one can be compared with it."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from milepost.engines.model_layout import read_shape
from milepost.engines.model_source import resolve_model
from milepost.engines.tokenizer import load_tokenizer
from milepost.flows.service_state import state_folder
from milepost.storage.parameters import Parameters

REFERENCE = "reference"  # in the model entry of a run's record


def reference_folder(parameters: Parameters, model: Mapping[str, Any] | None = None) -> str:
    """The Hugging Face folder of `reference.path`; nothing where the reference is the model that training began with.

    It is that which the run's record has for it in `model`, when that is there.
    """
    path, known = parameters.reference.path, (model or {}).get(REFERENCE, {})
    if not path:
        return ""
    if known.get("path") == path and Path(known["folder"]).is_dir():
        folder: str = known["folder"]
        return folder
    try:
        return resolve_model(path, str(state_folder() / "models"))
    except (ValueError, LookupError) as error:
        raise type(error)(f"reference.path cannot be used: {error}") from None


def as_recorded(parameters: Parameters, folder: str) -> dict[str, Any]:
    """For the model entry of a run's record."""
    return {REFERENCE: {"path": parameters.reference.path, "folder": folder}} if folder else {}


def check_reference(parameters: Parameters, folder: str, model_dir: str) -> None:
    """ValueError for a reference in `folder` of another shape than the model, or that reads tokens otherwise."""
    own, other = (read_shape(json.loads(Path(each, "config.json").read_text())) for each in (model_dir, folder))
    for name, value in asdict(own).items():
        found = asdict(other)[name]
        if name != "context" and found != value:
            raise ValueError(
                f"reference.path {parameters.reference.path!r} has {name} {found} and the model {value}: give a model "
                "of the same shape"
            )
    trusted = parameters.model.trust_remote_code
    vocabulary, others = (load_tokenizer(each, trust_remote_code=trusted) for each in (model_dir, folder))
    if differing := vocabulary.differences(others):
        raise ValueError(
            f"reference.path {parameters.reference.path!r} has another tokenizer, {differing} of whose "
            f"{others.vocab_size} tokens the model does not have under the same ids: give one with the same vocabulary"
        )
