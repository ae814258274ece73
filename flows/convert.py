"""`milepost convert`: a model or a checkpoint as a Hugging Face folder, or in Megatron's distributed format."""

from pathlib import Path
from typing import Any, cast, get_args

from milepost.engines.conversion import COMPLETE, Dtype, Form, StoredModel, convert, megatron_state, stored_dtype
from milepost.engines.model_layout import read_shape
from milepost.flows.checkpoint import Weights, find_weights
from milepost.flows.plan import model_folder
from milepost.storage import attempts, checkpoints, files


def convert_model(source: str, out: str, root: str, *, form: str, dtype: str, like: str) -> dict[str, Any]:
    """Write what `source` names at `out`; what cannot be is refused before weights are read."""
    _require_known("--to", form, get_args(Form))
    if dtype:
        _require_known("--dtype", dtype, get_args(Dtype))
    target = Path(out).absolute()
    if target.exists():
        raise FileExistsError(f"{target} already exists: name a folder that is not there yet")
    found = stored_model(source, root, like)
    read_shape(files.read_json(files.join(found.model_dir, "config.json")))
    chosen = cast(Dtype, dtype) if dtype else found.dtype
    digest = convert(found, str(target), cast(Form, form), chosen)
    return {"model": str(target), "format": form, "dtype": chosen, "weights": digest}


def _require_known(option: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{option} {value!r} is not known: give {' or '.join(known)}")


def stored_model(source: str, root: str, like: str) -> StoredModel:
    """Where the weights are that `source` names; LookupError or ValueError says what there is instead.

    `like` is the model of weights that Megatron-LM has saved, without a configuration that transformers reads.
    """
    state = megatron_state(Path(source))
    if state is not None:
        return _of_megatron(Path(source), state, like)
    if like:
        raise ValueError(f"--like is for weights in Megatron's format, and {source!r} has none: leave it out")
    return _of_weights(find_weights(source, root))


def _of_megatron(folder: Path, state: Path, like: str) -> StoredModel:
    if not state.is_dir():
        raise FileNotFoundError(f"{folder} names {state.name!r} as its newest state, which is not there")
    model_dir = model_folder(like) if like else str(folder)
    if not Path(model_dir, "config.json").is_file():
        raise ValueError(f"{str(folder)!r} has no config.json: name the Hugging Face model of its weights with --like")
    marker = folder / COMPLETE
    digest = marker.read_text() if marker.is_file() else ""
    return StoredModel(model_dir, stored_dtype(model_dir), str(state), digest)


def _of_weights(found: Weights) -> StoredModel:
    if found.run is None or found.version is None:
        return StoredModel(found.model_dir, stored_dtype(found.model_dir))
    parameters = attempts.current(found.run).parameters
    if parameters.engines.train != "megatron":
        raise ValueError(f"the trainer of run {found.run.run_id!r} was {parameters.engines.train!r}, without weights")
    saved = checkpoints.fetched(found.run, found.version.step)
    return StoredModel(found.model_dir, parameters.perf.dtype, saved.uri, saved.version.digest)
