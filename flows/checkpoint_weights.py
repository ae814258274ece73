"""A checkpoint as a folder that rollout engines load: made once, by its trainer, and kept in the run's workspace."""

import asyncio
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from milepost.engines.protocols import WeightSource
from milepost.flows.best import saved_step
from milepost.flows.checkpoint import Weights
from milepost.flows.progress import say
from milepost.flows.replay import trainer_before
from milepost.storage import attempts, checkpoints, files, retention
from milepost.storage.exports import kept_export
from milepost.storage.runs import RunFolder
from milepost.tasks.sync import current_weights


class OtherWeights(RuntimeError):
    """A checkpoint gave other weights than it names."""


async def exported_weights(weights: Weights, reader: str) -> WeightSource | None:
    """What engines of `reader` are to load beside the model that they start with; None when that is all."""
    if weights.run is None or weights.version is None:
        return None
    source = WeightSource(kept_export(weights.run, weights.version), weights.version)
    if not files.exists(source.uri) and not _linked(weights.run, source):
        with _pinned(weights.run, source.version.step, reader):
            await _convert(weights.run, source)
    return source


@contextmanager
def _pinned(folder: RunFolder, step: int, reader: str) -> Iterator[None]:
    """Keep a checkpoint until it is read: a run that goes on removes older ones, and its reader may have to wait."""
    name = f"read-by-{reader}"[: retention.PIN_NAME_CHARACTERS]
    try:
        retention.pin(folder, step, name, f"{reader} is to read its weights")
    except LookupError:  # it was there when the evaluation was planned
        saved_step(folder, str(step), checkpoints.complete(folder, hashes=False))
        raise
    try:
        yield
    finally:
        retention.unpin(folder, step, name)


def _linked(folder: RunFolder, source: WeightSource) -> bool:
    """Keep what the run exported of just these weights, if it is still there: it is removed as the run goes on."""
    current = current_weights(folder)
    if current is None or current.version != source.version or current.base is not None:
        return False
    return files.link_folder(current.uri, source.uri)


async def _convert(folder: RunFolder, source: WeightSource) -> None:
    """Have the run's trainer, started for this alone, read the checkpoint and write its weights."""
    step = source.version.step
    say(f"checkpoint {folder.run_id}@{step} is converted once, to {source.uri}")
    record = attempts.current(folder)
    async with trainer_before(folder, record, step, f"{folder.run_id}-export-{uuid.uuid4().hex[:8]}") as trainer:
        assert trainer is not None  # a run that saved a checkpoint trains
        found = await asyncio.to_thread(trainer.weights, source.uri, step)
    if found.version != source.version:
        files.remove_folder(source.uri)
        raise OtherWeights(f"checkpoint {folder.run_id}@{step} gives weights {found.version}, not {source.version}")
