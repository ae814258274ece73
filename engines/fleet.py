"""The processes of one run: trainer ranks, rollout engines, the router in front of them, and graders.

They belong to the process that started them and end with it; others find them by name.
"""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

from milepost.engines import cluster
from milepost.engines.app_server import RunningApp, start_app
from milepost.engines.frozen_model import frozen_model
from milepost.engines.gpu_placement import has_spare, rank_shares, reserved, shares_gpus
from milepost.engines.graders import GraderPool
from milepost.engines.protocols import WeightHolder
from milepost.engines.rollout_actor import RolloutActor, connect_rollout_engine, engine_name, serve
from milepost.engines.rollout_start import create_rollout
from milepost.engines.tool_processes import start_tools
from milepost.engines.train_actors import (
    CriticSetup,
    TrainActors,
    TrainSetup,
    connect_train_engine,
    create_train_engine,
    rank_name,
)
from milepost.storage.batch_plan import critic_optimizer
from milepost.storage.parameters import Parameters
from milepost.storage.stages import WHOLE, Course

ROUTER_FACTORY = "milepost.router.app:build_app"
RANKS = {
    "megatron": "milepost.engines.megatron_rank:MegatronRank",
    "fake": "milepost.engines.fake_rank:FakeRank",
}


@dataclass(frozen=True)
class Fleet:
    """A run's engines as its tasks see them, without a trainer where nothing is trained, and so on.

    Without a trainer `frozen` has the weights that engines are to serve. `engines` are numbered from `first` on. The
    `spare` is one more engine, behind a router of its own: what it serves is not what the others serve.
    """

    trainer: TrainActors | None
    engines: list[RolloutActor]
    router_url: str
    frozen: WeightHolder | None = None
    first: int = 0
    spare: "Fleet | None" = None

    @property
    def weights(self) -> WeightHolder:
        """Who gives the engines what they serve."""
        holder = self.trainer or self.frozen
        assert holder is not None
        return holder


class Closing(Protocol):
    """What is ended with the fleet."""

    def close(self) -> None: ...


def create_trainer(
    run: str, parameters: Parameters, model_dir: str, others: Mapping[str, str] = MappingProxyType({})
) -> TrainActors:
    """The trainer of a run; `others` are the folders of models that `reference` and `critic` have for themselves."""
    critic = None
    if parameters.algorithm.has_critic:
        critic = CriticSetup(others.get("critic", model_dir), critic_optimizer(parameters))
    setup = TrainSetup(
        model_dir=model_dir,
        model=parameters.model,
        optimizer=parameters.optimizer,
        perf=parameters.perf,
        temperature=parameters.rollout.temperature,
        seed=parameters.data.seed,
        reference_dir=others.get("reference", ""),
        critic=critic,
    )
    shares = rank_shares(run, parameters)
    return create_train_engine(
        run,
        setup,
        rank_class=RANKS[parameters.engines.train],
        timeout_seconds=parameters.engines.start_timeout_seconds,
        resources=[share.options() for share in shares] if shares else None,
    )


def _serve_all(engines: list[RolloutActor], spare: list[RolloutActor], parameters: Parameters) -> None:
    """Have the engines serve, side by side unless each is to leave its GPU to the next before that comes."""
    timeout = parameters.engines.start_timeout_seconds
    if not shares_gpus(parameters):
        serve([*engines, *spare], timeout_seconds=timeout)
        return
    for engine in engines:
        serve([engine], timeout_seconds=timeout)
        engine.release_memory()  # the trainer starts on the same GPU
    serve(spare, timeout_seconds=timeout)


def _start_router(name: str, engines: list[RolloutActor], parameters: Parameters) -> RunningApp:
    workers = [engine.url() for engine in engines]
    kwargs = {
        "workers": workers,
        "policy": parameters.engines.router_policy,
        "request_timeout_seconds": parameters.rollout.timeout_seconds,
    }
    return start_app(name, ROUTER_FACTORY, kwargs)


def _router_name(run: str) -> str:
    return f"{run}/router"


def _spare_router_name(run: str) -> str:
    return f"{run}/spare-router"


@contextmanager
def fleet(
    run: str,
    parameters: Parameters,
    model_dir: str,
    *,
    others: Mapping[str, str] = MappingProxyType({}),
    course: Course = WHOLE,
    engine_options: Mapping[str, Any] | None = None,
) -> Iterator[Fleet]:
    """Start every process that the stages of `run` need, and end them all on the way out, whatever happened.

    All processes come first and models after them, because importing takes as long as loading a small model.
    `others` are as of create_trainer, `engine_options` are further arguments of the rollout engine's class.
    """
    with ExitStack() as stack:
        stack.enter_context(reserved(run, parameters))
        started: list[Closing] = []
        stack.callback(_close_all, started)
        trainer = create_trainer(run, parameters, model_dir, others) if course.trains else None
        if trainer:
            started.append(trainer)
        serving: list[RolloutActor] = []
        count = _engine_count(parameters, course)
        for index in range(count + (count > 0 and has_spare(parameters))):
            serving.append(create_rollout(run, index, parameters, model_dir, options=engine_options))
            started.append(serving[-1])
        engines, spare = serving[:count], serving[count:]
        if course.makes("score"):
            reward = parameters.reward
            started.append(GraderPool.start(run, workers=reward.workers, memory_bytes=reward.memory_bytes))
        if count and parameters.rollout.tools:
            started.append(start_tools(run, parameters.rollout))
        _serve_all(engines, spare, parameters)
        if trainer:
            trainer.load()
        urls = []
        for name, behind in ((_router_name(run), engines), (_spare_router_name(run), spare)):
            if behind:
                router = _start_router(name, behind, parameters)
                started.append(router)
                urls.append(router.url())
        frozen = frozen_model(model_dir, parameters)
        beside = Fleet(None, spare, urls[-1], frozen, first=count) if spare else None
        yield Fleet(trainer, engines, urls[0] if urls else "", None if trainer else frozen, spare=beside)


def _engine_count(parameters: Parameters, course: Course) -> int:
    return parameters.engines.rollout_engines if course.makes("generate") else 0


def _close_all(started: Sequence[Closing]) -> None:
    """All at once: one that hangs delays no other."""
    with ThreadPoolExecutor(max(1, len(started))) as pool:
        for closing in [pool.submit(one.close) for one in started]:
            closing.result()


def connect_fleet(run: str, parameters: Parameters, course: Course = WHOLE) -> Fleet:
    """The running engines of `run`; EngineMissing names the rank or router that is not there.

    How long the trainer may take is for the caller to say: a stage has a deadline.
    """
    timeout, count = parameters.sync.timeout_seconds, _engine_count(parameters, course)
    trainer = connect_train_engine(run, parameters.model.ranks, timeout_seconds=math.inf) if course.trains else None
    engines = [connect_rollout_engine(run, index, timeout_seconds=timeout) for index in range(count)]
    url = cluster.wait(cluster.actor(_router_name(run)).url.remote(), timeout, what="the router") if engines else ""
    return Fleet(trainer, engines, url)


def stacks(run: str, parameters: Parameters) -> dict[str, str]:
    """What every thread of every engine of `run` is doing now, by the engine's name; and of this process."""
    ranks = [rank_name(run, rank) for rank in range(parameters.model.ranks)]
    count = parameters.engines.rollout_engines + has_spare(parameters)
    engines = [engine_name(run, index) for index in range(count)]
    return cluster.stacks_of([*ranks, *engines, _router_name(run)]) | {"this process": cluster.stacks_here()}


def is_engine_failure(error: BaseException) -> bool:
    """Whether new engines may do what failed: a process died, hung, or could not be reached."""
    return isinstance(error, cluster.EngineFailure | ConnectionError)


def is_joined() -> bool:
    """Whether this process is in a Ray cluster."""
    return cluster.is_connected()


@contextmanager
def joined_cluster(address: str | None) -> Iterator[None]:
    """In the Ray cluster at `address`, or one of this process's own; left at the end unless it was joined before."""
    if is_joined():
        yield
        return
    cluster.connect(address, num_cpus=None if address else os.cpu_count())
    try:
        yield
    finally:
        cluster.disconnect()
