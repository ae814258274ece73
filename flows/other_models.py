"""The models of a run beside the policy, the one it is compared with and its critic: their folders, and if they fit."""

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

Folders = Mapping[str, str]
"""Hugging Face folders by section of the parameters: of `reference` and `critic`, those that have a path."""


def other_models(parameters: Parameters, model: Mapping[str, Any] | None = None) -> dict[str, str]:
    """The folders of those that are not the model that training began with.

    They are those which the run's record has for them in `model`, when they are there.
    """
    paths = {"reference": parameters.reference.path}
    if parameters.algorithm.has_critic:
        paths["critic"] = parameters.critic.path
    return {section: _folder(section, path, (model or {}).get(section, {})) for section, path in paths.items() if path}


def _folder(section: str, path: str, known: Mapping[str, str]) -> str:
    if known.get("path") == path and Path(known["folder"]).is_dir():
        return known["folder"]
    try:
        return resolve_model(path, str(state_folder() / "models"))
    except (ValueError, LookupError) as error:
        raise type(error)(f"{section}.path cannot be used: {error}") from None


def as_recorded(parameters: Parameters, folders: Folders) -> dict[str, Any]:
    """For the model entry of a run's record."""
    return {
        section: {"path": getattr(parameters, section).path, "folder": folder} for section, folder in folders.items()
    }


def check_others(parameters: Parameters, folders: Folders, model_dir: str) -> None:
    """ValueError for one of another shape than the model, or that reads tokens otherwise."""
    for section, folder in folders.items():
        _check(section, getattr(parameters, section).path, folder, model_dir, parameters.model.trust_remote_code)


def _check(section: str, path: str, folder: str, model_dir: str, trusted: bool) -> None:
    own, other = (read_shape(json.loads(Path(each, "config.json").read_text())) for each in (model_dir, folder))
    ignored = ("context", "tied") if section == "critic" else ("context",)  # a critic has a head of its own
    for name, value in asdict(own).items():
        found = asdict(other)[name]
        if name not in ignored and found != value:
            raise ValueError(
                f"{section}.path {path!r} has {name} {found} and the model {value}: give a model of the same shape"
            )
    vocabulary, others = (load_tokenizer(each, trust_remote_code=trusted) for each in (model_dir, folder))
    if differing := vocabulary.differences(others):
        raise ValueError(
            f"{section}.path {path!r} has another tokenizer, {differing} of whose {others.vocab_size} tokens the model "
            "does not have under the same ids: give one with the same vocabulary"
        )
