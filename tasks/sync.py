"""The last node: the new weights reach every rollout engine before anything is generated again.

Never answered from the journal: its effect lives in the memory of processes.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Iterable
from dataclasses import asdict, dataclass, field
from typing import TypeVar

from prefect import task
from prefect.cache_policies import NO_CACHE

from milepost.engines.cluster import EngineDied, EngineMissing, EngineTimeout
from milepost.engines.protocols import (
    ExportKind,
    PauseMode,
    RolloutEngine,
    TrainEngine,
    WeightHolder,
    WeightSource,
    WeightVersion,
)
from milepost.engines.weight_folders import folder_bytes, full_folder
from milepost.router.control import Rotation, rotation, set_weight_version
from milepost.storage import checkpoints, files
from milepost.storage.parameters import Parameters, SyncSection
from milepost.storage.runs import RunFolder

T = TypeVar("T")
KEEP_EXPORTS = 2
FOLDERS = ("disk", "delta")  # transports that write a folder for engines to load
ADMISSION_SECONDS = 0.5


@dataclass(frozen=True)
class Synced:
    """What engines and trainer now hold, the checkpoint that was saved of it if one was due, and how long it took."""

    version: WeightVersion
    checkpoint: str
    seconds: float
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Pushed:
    """The weights that engines now hold, and what it took."""

    version: WeightVersion
    metrics: dict[str, float]


class SyncMismatch(RuntimeError):
    """An engine holds other weights than the trainer after loading them."""


def sync_section(parameters: Parameters) -> SyncSection:
    """How weights go over: in a folder where no trainer sends them, or no engine takes them."""
    sync, engines = parameters.sync, parameters.engines
    return sync.model_copy(update={"transport": "disk"}) if "none" in (engines.train, engines.rollout) else sync


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
    kept = full_folder(folder.weights(max(0, newest - KEEP_EXPORTS + 1)))  # and what builds on it
    for name in files.names(files.join(folder.workspace, "weights")):
        if name.isdigit() and folder.weights(int(name)) < kept:
            files.remove_folder(folder.weights(int(name)))


async def push_weights(
    version: int,
    sync: SyncSection,
    *,
    folder: RunFolder,
    trainer: WeightHolder,
    engines: list[RolloutEngine],
    router_url: str,
) -> Pushed:
    """Bring the trainer's weights, as `version`, into every engine, each all or nothing by digest.

    Without engines they are only written. An engine that has died is left to whoever starts it again: it loads the
    current weights then, and the router keeps it out until it holds them. EngineTimeout when an engine does not answer
    in time, or when none serves `version`.
    """
    started = time.monotonic()
    if sync.transport in FOLDERS:
        source, metrics = await load_folder(version, sync, folder=folder, trainer=trainer, engines=engines)
    else:
        admitted = await _admitted(engines, router_url)
        source, metrics = await send_live(version, sync, folder=folder, trainer=trainer, engines=admitted)
    metrics["sync/seconds"] = time.monotonic() - started
    moving = metrics.get("sync/transfer_seconds", metrics["sync/seconds"])
    metrics["sync/gigabytes_per_second"] = metrics["sync/bytes"] / 1e9 / max(moving, 1e-9)
    if engines:
        serving = await set_weight_version(router_url, source.version)
        await _until_served(serving, router_url, timeout_seconds=sync.timeout_seconds)
    remove_old_exports(folder, version)
    return Pushed(source.version, metrics)


Sent = tuple[WeightSource, dict[str, float]]


async def load_folder(
    version: int, sync: SyncSection, *, folder: RunFolder, trainer: WeightHolder, engines: list[RolloutEngine]
) -> Sent:
    """Export a folder, and have every engine load it."""
    kind: ExportKind = "delta" if sync.transport == "delta" else "full"
    source = await asyncio.to_thread(trainer.weights, folder.weights(version), version, kind)
    _publish(folder, source)  # before any engine is asked to load it
    await _of_living(asyncio.to_thread(load_into, engine, source, mode=sync.pause_mode) for engine in engines)
    return source, {"sync/bytes": float(folder_bytes(source.uri))}


async def send_live(
    version: int, sync: SyncSection, *, folder: RunFolder, trainer: WeightHolder, engines: list[RolloutEngine]
) -> Sent:
    """Have the trainer send its weights into the engines. One that did not take them loads a folder instead."""
    urls = await _of_living(asyncio.to_thread(_paused, engine, sync.pause_mode) for engine in engines)
    asked = {url: engine for url, engine in zip(urls, engines, strict=True) if url is not None}
    report = await asyncio.to_thread(trainer.push, list(asked), version, sync)
    source = WeightSource(folder.weights(version), report.version)
    files.remove_folder(source.uri)  # one that is left of an earlier attempt may be of other weights
    _publish(folder, source)
    await _of_living(asyncio.to_thread(engine.resume) for url, engine in asked.items() if url not in report.failed)
    if report.failed:
        logging.getLogger(__name__).warning("%s; a folder is loaded instead", "; ".join(report.failed.values()))
        await asyncio.to_thread(trainer.export, source.uri, source.version)
        failed = (asked[url] for url in report.failed)
        await _of_living(asyncio.to_thread(load_into, engine, source, mode=sync.pause_mode) for engine in failed)
    metrics = {f"sync/{name}": value for name, value in report.metrics.items()}
    return source, metrics | {"sync/failed": float(len(report.failed))}


async def _admitted(engines: list[RolloutEngine], router_url: str) -> list[RolloutEngine]:
    """Without engines that have just been started: whoever does that loads what is current into them."""
    known = {worker.url for worker in (await rotation(router_url)).workers if worker.state != "stale"}
    urls = await _of_living(asyncio.to_thread(engine.url) for engine in engines)
    return [engine for engine, url in zip(engines, urls, strict=True) if url in known]


def _paused(engine: RolloutEngine, mode: PauseMode) -> str:
    engine.pause(mode)
    return engine.url()


async def _of_living(asked: Iterable[Awaitable[T]]) -> list[T | None]:
    """The answers, with None for an engine that has died; the first error of one that has not."""
    answers: list[T | None] = []
    for found in await asyncio.gather(*asked, return_exceptions=True):
        if isinstance(found, EngineDied | EngineMissing):
            answers.append(None)
        elif isinstance(found, BaseException):
            raise found
        else:
            answers.append(found)
    return answers


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


def _publish(folder: RunFolder, source: WeightSource) -> None:
    files.publish_json(_current(folder), asdict(source), overwrite=True)


def current_weights(folder: RunFolder) -> WeightSource | None:
    """The weights that the engines of a run are to hold; None before the first were pushed."""
    if not files.exists(_current(folder)):
        return None
    return WeightSource.parse(files.read_json(_current(folder)))


def exported(source: WeightSource, trainer: WeightHolder) -> bool:
    """Whether there is a folder of current weights, which is written now when they were sent without one.

    Not when the trainer has gone on: the weights that it sends next reach every engine.
    """
    if files.exists(source.uri):
        return True
    try:
        return trainer.export(source.uri, source.version) is not None
    except EngineTimeout:
        return False  # it is at work, after which its weights are others


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
    uri = ""
    if save:
        uri = await asyncio.to_thread(save_checkpoint, pushed.version, folder=folder, trainer=trainer)
    return Synced(pushed.version, uri, time.monotonic() - started, pushed.metrics)
