"""The driver's handle on a rollout engine: control goes over Ray, generation over HTTP."""

import contextlib
from collections.abc import Sequence
from typing import Any

from milepost.engines import cluster
from milepost.engines.app_server import start_serving, stop_serving_actor
from milepost.engines.protocols import PauseMode, WeightSource, WeightVersion
from milepost.engines.served_engine import ServedEngine

DEFAULT_TIMEOUT_SECONDS = 600.0


class RolloutActor:
    """The driver's side of a rollout engine: RolloutEngine, synchronously, each call with a deadline.

    The engine is whichever actor has the name when it is asked, so this outlives an engine that is started again.
    `owned` is the actor's handle where this process started it: the actor ends when nobody holds that.
    """

    def __init__(
        self, name: str, *, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS, owned: Any | None = None
    ) -> None:
        self.name = name
        self._timeout_seconds = timeout_seconds
        self.owned = owned

    def url(self) -> str:
        url: str = self._ask("url")
        return url

    def weight_version(self) -> WeightVersion:
        version: WeightVersion = self._ask("weight_version")
        return version

    def pause(self, mode: PauseMode) -> None:
        self._ask("pause", mode)

    def resume(self) -> None:
        self._ask("resume")

    def load_weights(self, source: WeightSource) -> WeightVersion:
        version: WeightVersion = self._ask("load_weights", source)
        return version

    def release_memory(self) -> None:
        self._ask("release_memory")

    def resume_memory(self, tags: Sequence[str] | None = None) -> None:
        self._ask("resume_memory", *([] if tags is None else [tags]))

    def abort(self) -> None:
        self._ask("abort")

    async def require_alive(self) -> str:
        """Its URL; EngineFailure unless the engine's process answers, as a busy one does."""
        ref = cluster.actor(self.name).url.remote()
        url: str = await cluster.answer(ref, self._timeout_seconds, what=f"a sign of life of {self.name}")
        return url

    def close(self) -> None:
        """Let responses in flight go out as aborted, then end the actor, if there is one."""
        with contextlib.suppress(cluster.EngineMissing):
            stop_serving_actor(cluster.actor(self.name))

    def _ask(self, method: str, *args: Any) -> Any:
        ref = getattr(cluster.actor(self.name), method).remote(*args)
        return cluster.wait(ref, self._timeout_seconds, what=f"{method} of {self.name}")


def engine_name(run: str, index: int) -> str:
    return f"{run}/rollout-{index}"


def create_rollout_engine(
    run: str,
    index: int,
    *,
    engine_class: type[ServedEngine],
    call_timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    **kwargs: Any,
) -> RolloutActor:
    """A process for an engine of this run, which imports what it needs while others start; `serve` has it load."""
    name = engine_name(run, index)
    handle = cluster.start_actor(engine_class, name, **kwargs)
    return RolloutActor(name, timeout_seconds=call_timeout_seconds, owned=handle)


def start_rollout_engine(run: str, index: int, *, timeout_seconds: float, **kwargs: Any) -> RolloutActor:
    """Create an engine of this run and wait until it answers; its own error when it cannot."""
    engine = create_rollout_engine(run, index, **kwargs)
    serve([engine], timeout_seconds=timeout_seconds)
    return engine


def serve(engines: Sequence[RolloutActor], *, timeout_seconds: float) -> None:
    """Have engines that this process created load and serve, side by side; all end when one cannot."""
    start_serving({engine.name: engine.owned for engine in engines}, timeout_seconds=timeout_seconds)


def connect_rollout_engine(run: str, index: int, *, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS) -> RolloutActor:
    """Engine `index` of a run, whose methods raise EngineMissing while there is none."""
    return RolloutActor(engine_name(run, index), timeout_seconds=timeout_seconds)
