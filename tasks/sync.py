"""The last node: the new weights reach every rollout engine before anything is generated again.

Never answered from the journal: its effect lives in the memory of processes.
"""

import asyncio
from dataclasses import dataclass

from prefect import task
from prefect.cache_policies import NO_CACHE

from milepost.engines.protocols import PauseMode, RolloutEngine, TrainEngine, WeightSource, WeightVersion
from milepost.router.client import set_weight_version
from milepost.storage import checkpoints, files
from milepost.storage.parameters import SyncSection
from milepost.storage.runs import RunFolder

KEEP_EXPORTS = 2


@dataclass(frozen=True)
class Synced:
    """What engines and trainer now hold, and the checkpoint that was saved of it, if one was due."""

    version: WeightVersion
    checkpoint: str


class SyncMismatch(RuntimeError):
    """An engine holds other weights than the trainer after loading them."""


def load_into(engine: RolloutEngine, source: WeightSource, *, mode: PauseMode) -> WeightVersion:
    """Pause, load, resume. The engine goes on with the weights it had when loading fails."""
    engine.pause(mode)
    try:
        loaded = engine.load_weights(source)
    finally:
        engine.resume()
    if loaded != source.version:
        raise SyncMismatch(f"{engine.url()} holds weights {loaded} after loading {source.version}: start it again")
    return loaded


def remove_old_exports(folder: RunFolder, newest: int) -> None:
    """Weights that no engine needs any more; checkpoints are kept elsewhere."""
    for name in files.names(files.join(folder.uri, "weights")):
        if name.isdigit() and int(name) <= newest - KEEP_EXPORTS:
            files.remove_folder(folder.weights(int(name)))


async def push_weights(
    version: int,
    sync: SyncSection,
    *,
    folder: RunFolder,
    trainer: TrainEngine,
    engines: list[RolloutEngine],
    router_url: str,
) -> WeightVersion:
    """Export the trainer's weights as `version` and load them into every engine, each all or nothing by digest."""
    source = await asyncio.to_thread(trainer.weights, folder.weights(version), version)
    async with asyncio.timeout(sync.timeout_seconds):
        loads = (asyncio.to_thread(load_into, engine, source, mode=sync.pause_mode) for engine in engines)
        await asyncio.gather(*loads)
        await set_weight_version(router_url, source.version)
    remove_old_exports(folder, version)
    return source.version


def save_checkpoint(version: WeightVersion, *, folder: RunFolder, trainer: TrainEngine) -> str:
    """Save and publish a checkpoint of `version`.

    One that is there already, complete and of these weights, stays as it is: a step that is repeated after a crash
    never trades a checkpoint for none. Older ones are removed by storage.retention once the step is closed, because
    until then the run goes back to one of them.
    """
    uri = folder.checkpoint(version.step)
    if not checkpoints.holds(folder, version):
        checkpoints.withdraw(folder, version.step)
        checkpoints.publish(folder, trainer.save(uri))
    return uri


@task(task_run_name="sync-{version}", cache_policy=NO_CACHE)
async def sync_weights(
    version: int,
    sync: SyncSection,
    *,
    save: bool,
    folder: RunFolder,
    trainer: TrainEngine,
    engines: list[RolloutEngine],
    router_url: str,
) -> Synced:
    """Push the weights after `version` steps to every engine, and save a checkpoint of them when `save` is set."""
    pushed = await push_weights(version, sync, folder=folder, trainer=trainer, engines=engines, router_url=router_url)
    if not save:
        return Synced(pushed, "")
    uri = await asyncio.to_thread(save_checkpoint, pushed, folder=folder, trainer=trainer)
    return Synced(pushed, uri)
