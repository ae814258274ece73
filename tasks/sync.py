"""The last node: the new weights reach every rollout engine before anything is generated again.

Never answered from the journal: its effect lives in the memory of processes.
"""

import asyncio
import time
from dataclasses import asdict, dataclass

from prefect import task
from prefect.cache_policies import NO_CACHE

from milepost.engines.cluster import EngineDied, EngineMissing, EngineTimeout
from milepost.engines.protocols import PauseMode, RolloutEngine, TrainEngine, WeightSource, WeightVersion
from milepost.router.control import Rotation, rotation, set_weight_version
from milepost.storage import checkpoints, files
from milepost.storage.parameters import SyncSection
from milepost.storage.runs import RunFolder

KEEP_EXPORTS = 2
ADMISSION_SECONDS = 0.5


@dataclass(frozen=True)
class Synced:
    """What engines and trainer now hold, the checkpoint that was saved of it if one was due, and how long it took."""

    version: WeightVersion
    checkpoint: str
    seconds: float


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
    for name in files.names(files.join(folder.workspace, "weights")):
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
    """Export the trainer's weights as `version` and load them into every engine, each all or nothing by digest.

    An engine that has died is left to whoever starts it again: it loads the current weights then, and the router keeps
    it out until it holds them. EngineTimeout when an engine does not answer in time, or when none serves `version`.
    """
    source = await asyncio.to_thread(trainer.weights, folder.weights(version), version)
    files.publish_json(_current(folder), asdict(source), overwrite=True)  # before any engine is asked to load it
    loads = (asyncio.to_thread(load_into, engine, source, mode=sync.pause_mode) for engine in engines)
    for found in await asyncio.gather(*loads, return_exceptions=True):
        if isinstance(found, BaseException) and not isinstance(found, EngineDied | EngineMissing):
            raise found
    serving = await set_weight_version(router_url, source.version)
    await _until_served(serving, router_url, timeout_seconds=sync.timeout_seconds)
    remove_old_exports(folder, version)
    return source.version


async def _until_served(found: Rotation, router_url: str, *, timeout_seconds: float) -> None:
    try:
        async with asyncio.timeout(timeout_seconds):
            while not found.serving:
                await asyncio.sleep(ADMISSION_SECONDS)
                found = await rotation(router_url)
    except TimeoutError:
        states = ", ".join(f"{worker.url} is {worker.state}" for worker in found.workers)
        raise EngineTimeout(f"no engine serves weights {found.version} after {timeout_seconds:g} s: {states}") from None


def _current(folder: RunFolder) -> str:
    return files.join(folder.workspace, "weights", "current.json")


def current_weights(folder: RunFolder) -> WeightSource | None:
    """The weights that the engines of a run are to hold; None before the first were pushed."""
    if not files.exists(_current(folder)):
        return None
    content = files.read_json(_current(folder))
    return WeightSource(content["uri"], WeightVersion(**content["version"]))


def save_checkpoint(version: WeightVersion, *, folder: RunFolder, trainer: TrainEngine) -> str:
    """Save and publish a checkpoint of `version`.

    One that is there already, complete and of these weights, stays as it is: a step that is repeated after a crash
    never trades a checkpoint for none. Older ones are removed by storage.retention once the step is closed, because
    until then the run goes back to one of them.
    """
    if not checkpoints.holds(folder, version):
        checkpoints.withdraw(folder, version.step)
        checkpoints.publish(folder, trainer.save(folder.trainer_state(version.step)))
    return folder.checkpoint(version.step)


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
    started = time.monotonic()
    pushed = await push_weights(version, sync, folder=folder, trainer=trainer, engines=engines, router_url=router_url)
    if not save:
        return Synced(pushed, "", time.monotonic() - started)
    uri = await asyncio.to_thread(save_checkpoint, pushed, folder=folder, trainer=trainer)
    return Synced(pushed, uri, time.monotonic() - started)
