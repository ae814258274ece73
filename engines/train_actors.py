"""The train engine as the driver sees it: named Ray actors, one a rank, that are all told the same.

The actors belong to the process that started them and end with it.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from milepost.engines import cluster
from milepost.engines.protocols import (
    CheckpointRef,
    ExportKind,
    PushReport,
    Role,
    UpdateParams,
    UpdateResult,
    WeightSource,
    WeightVersion,
)
from milepost.engines.rank_actor import RankActor
from milepost.storage.parameters import ModelSection, SyncSection
from milepost.storage.tables import TableRef
from milepost.storage.training import OptimizerSection, PerfSection

import ray  # isort: skip  (after cluster, which sets how it authenticates)


CONTROL_SECONDS = 60.0


@dataclass(frozen=True)
class CriticSetup:
    """The folder of the model that a critic begins as, all but its head, and its optimizer."""

    model_dir: str
    optimizer: OptimizerSection


@dataclass(frozen=True)
class TrainSetup:
    """What a trainer is made of. `temperature` is the one samples are drawn at; `seed` is of its random streams.

    The reference policy is the model in `reference_dir`, or the one that is trained as it is in `model_dir`. Without
    `critic` there is none.
    """

    model_dir: str
    model: ModelSection
    optimizer: OptimizerSection
    perf: PerfSection
    temperature: float
    seed: int
    reference_dir: str = ""
    critic: CriticSetup | None = None

    @property
    def world(self) -> int:
        return self.model.ranks


class TrainEngineDied(cluster.EngineDied):
    """A rank's process ended while it was asked for something. The engine is of no more use: close it."""


class TrainActors:
    """TrainEngine over ranks. A call that takes longer than `timeout_seconds` raises EngineTimeout."""

    def __init__(self, ranks: Sequence[Any], *, timeout_seconds: float) -> None:
        self._ranks = ranks
        self._timeout_seconds = timeout_seconds

    def _call(self, method: str, *args: Any) -> Any:
        """Rank 0's answer to a call of `method` on every rank; the error of the first rank that failed."""
        refs = [rank.call.remote(method, *args) for rank in self._ranks]
        return _first_answer(refs, self._timeout_seconds, what=f"{method} of the train engine")

    def logprobs(self, batch: TableRef, role: Role, uri: str) -> TableRef:
        filled: TableRef = self._call("logprobs", batch, role, uri)
        return filled

    def values(self, batch: TableRef, uri: str) -> TableRef:
        filled: TableRef = self._call("values", batch, uri)
        return filled

    def renew_reference(self, name: str) -> None:
        self._call("renew_reference", name)

    def step(self, batch: TableRef, update: UpdateParams, key: str) -> UpdateResult:
        result: UpdateResult = self._call("step", batch, update, key)
        return result

    def critic_step(self, batch: TableRef, update: UpdateParams, key: str) -> UpdateResult | None:
        result: UpdateResult | None = self._call("critic_step", batch, update, key)
        return result

    def digest(self) -> str:
        digest: str = self._call("digest")
        return digest

    def save(self, uri: str) -> CheckpointRef:
        ref: CheckpointRef = self._call("save", uri)
        return ref

    async def is_resting(self) -> bool:
        """Whether the trainer has given its memory up; answered while it works."""
        ref = self._ranks[0].is_resting.remote()
        resting: bool = await cluster.answer(ref, CONTROL_SECONDS, what="whether the train engine has memory")
        return resting

    def restore(self, ref: CheckpointRef) -> None:
        self._call("restore", ref)

    def release_memory(self) -> None:
        self._call("release_memory")

    def resume_memory(self) -> None:
        self._call("resume_memory")

    def weights(self, uri: str, step: int, kind: ExportKind = "full") -> WeightSource:
        source: WeightSource = self._call("weights", uri, step, kind)
        return source

    def export(self, uri: str, version: WeightVersion) -> WeightSource | None:
        source: WeightSource | None = self._call("export", uri, version)
        return source

    def push(self, urls: Sequence[str], step: int, sync: SyncSection) -> PushReport:
        report: PushReport = self._call("push", urls, step, sync)
        return report

    def load(self) -> None:
        """Let the ranks find each other and load the model; no rank is left when that fails."""
        try:
            self._connect_ranks()
        except BaseException:
            self.close()
            raise

    def _connect_ranks(self) -> None:
        address, port = cluster.wait(
            self._ranks[0].call.remote("rendezvous"), self._timeout_seconds, what="rank 0 of the train engine"
        )
        self._call("connect", address, port)

    def close(self) -> None:
        """End every rank at once."""
        for rank in self._ranks:
            cluster.kill(rank)


def _first_answer(refs: Sequence[Any], timeout_seconds: float, *, what: str) -> Any:
    """The first ref's value once all are done. The first error is raised at once: the other ranks may wait for it."""
    deadline = time.monotonic() + timeout_seconds
    pending = list(refs)
    while pending:
        done, pending = ray.wait(pending, timeout=cluster.POLL_SECONDS)
        for ref in done:
            try:
                cluster.wait(ref, timeout_seconds, what=what)
            except cluster.EngineDied as error:
                raise TrainEngineDied(
                    f"rank {refs.index(ref)} died during {what}: restore the last checkpoint"
                ) from error
        if pending and time.monotonic() > deadline:
            silent = ", ".join(str(refs.index(ref)) for ref in pending)
            raise cluster.EngineTimeout(
                f"{what} did not finish within {timeout_seconds:g} s, no answer came from rank {silent}"
            )
    return cluster.wait(refs[0], timeout_seconds, what=what)


def rank_name(run: str, rank: int) -> str:
    return f"{run}/train-{rank}"


def create_train_engine(
    run: str,
    setup: TrainSetup,
    *,
    rank_class: str,
    timeout_seconds: float,
    resources: Sequence[Mapping[str, Any]] | None = None,
) -> TrainActors:
    """One actor a rank, which imports what it needs while others start; `load` makes them an engine.

    `rank_class` is `pkg.mod:Class`, built as `Class(rank, world, setup)` in the rank's process. `resources` are Ray's
    options for each rank; a GPU, where there is one, when empty.
    """
    placed = resources or [{"num_gpus": min(1.0, cluster.gpus())}] * setup.world
    ranks: list[Any] = []
    engine = TrainActors(ranks, timeout_seconds=timeout_seconds)
    try:
        for rank in range(setup.world):
            name = rank_name(run, rank)
            arguments = rank_class, rank, setup.world, setup
            ranks.append(cluster.start_actor(RankActor, name, *arguments, resources=placed[rank]))
    except BaseException:
        engine.close()
        raise
    return engine


def start_train_engine(run: str, setup: TrainSetup, **options: Any) -> TrainActors:
    """Create a train engine and wait until all ranks hold their part of the model; none is left when that fails."""
    engine = create_train_engine(run, setup, **options)
    engine.load()
    return engine


def connect_train_engine(run: str, world: int, timeout_seconds: float) -> TrainActors:
    """The running engine of `run`; LookupError when a rank is missing."""
    return TrainActors([cluster.actor(rank_name(run, rank)) for rank in range(world)], timeout_seconds=timeout_seconds)
