"""A model's weights alone, converted by one process without engines: a Hugging Face folder, or Megatron's format.

The latter is a folder as Megatron-LM has it, with a `release` that any layout loads, beside what makes it a Hugging
Face model again: configuration and tokenizer. Megatron pickles a part of it: whoever opens a folder has to trust it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from milepost.engines import cluster, megatron_world
from milepost.engines.conversion import COMPLETE, RELEASE, TRACKER, Dtype, Form, StoredModel
from milepost.engines.cpu_shim import CpuRngTracker
from milepost.engines.digest import weights_digest
from milepost.engines.hf_export import copy_side_files, export_folder, new_folder
from milepost.engines.hf_folder import HfFolder
from milepost.engines.megatron_model import DTYPES, build_model
from milepost.engines.megatron_model_state import unsaved
from milepost.engines.megatron_weights import gather_weights, load_weights
from milepost.engines.model_layout import ModelShape, read_shape
from milepost.storage import files
from milepost.storage.parameters import ModelSection
from milepost.storage.training import PerfSection


def write_model(source: StoredModel, out: str, form: Form, dtype: Dtype) -> str:
    """See conversion.convert."""
    with _model_of(source) as (gpt, shape):
        _load(gpt, shape, source)
        gpt.to(DTYPES[dtype])
        if form == "hf":
            return export_folder(gather_weights(gpt, shape), out, model_dir=source.model_dir, dtype=dtype)
        return _write(gpt, shape, Path(out), source.model_dir, dtype)


@contextmanager
def _model_of(source: StoredModel) -> Iterator[tuple[GPTModel, ModelShape]]:
    """A whole model on this process alone, with weights that are still to be loaded."""
    shape = read_shape(files.read_json(files.join(source.model_dir, "config.json")))
    megatron_world.keep_to_loopback(cluster.LOOPBACK)
    store = megatron_world.open_store(cluster.LOOPBACK, 1)
    with megatron_world.on_device(megatron_world.thread_count(0, 1), CpuRngTracker()):
        megatron_world.join_world(store, rank=0, world=1, model=ModelSection())
        try:
            megatron_world.seed_streams(0)
            yield build_model(shape, ModelSection(), PerfSection(dtype=source.dtype)), shape
        finally:
            megatron_world.leave_world()


def _state(gpt: GPTModel) -> dict[str, Any]:
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return {"model": gpt.sharded_state_dict(metadata={"dp_cp_group": group})}


@torch.no_grad()
def _load(gpt: GPTModel, shape: ModelShape, source: StoredModel) -> None:
    if not source.state:
        load_weights(gpt, shape, HfFolder(source.model_dir))
        return
    wanted = _state(gpt)
    if lacking := sorted(unsaved(Path(source.state), wanted)):
        raise ValueError(f"{source.state} has no weight {lacking[0]!r}: it is not what config.json says")
    gpt.load_state_dict(dist_checkpointing.load(wanted, source.state)["model"])
    if source.digest and (found := weights_digest(_named(gpt, shape))) != source.digest:
        raise ValueError(f"{source.state} holds weights {found[:16]}, not {source.digest[:16]}: restore it from a copy")


def _named(gpt: GPTModel, shape: ModelShape) -> Iterator[tuple[str, Tensor]]:
    return gather_weights(gpt, shape, to_cpu=False)


def _write(gpt: GPTModel, shape: ModelShape, out: Path, model_dir: str, dtype: Dtype) -> str:
    digest = weights_digest(_named(gpt, shape))
    with new_folder(out) as folder:
        (folder / RELEASE).mkdir()
        # What Megatron-LM looks for beside the weights.
        dist_checkpointing.save({**_state(gpt), "checkpoint_version": 3.0, "iteration": 0}, str(folder / RELEASE))
        (folder / TRACKER).write_text(RELEASE)
        copy_side_files(Path(model_dir), folder, dtype)
        (folder / COMPLETE).write_text(digest)
    return digest
