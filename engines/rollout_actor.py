"""Rollout engines as Ray actors, and the driver's handle on one: control goes over Ray, generation over HTTP."""

import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from milepost.engines import cluster
from milepost.engines.app_server import HttpServer, stop_serving_actor, wait_until_serving
from milepost.engines.embedded_api import build_app
from milepost.engines.embedded_backend import EmbeddedBackend
from milepost.engines.fake_backend import CharacterText, FakeModel
from milepost.engines.protocols import PauseMode, WeightSource, WeightVersion

import ray  # isort: skip  (after cluster, which sets how it authenticates)

DEFAULT_TIMEOUT_SECONDS = 600.0


class ServedEngine(ABC):
    """Ray actor: a backend, its HTTP server, and the methods of RolloutEngine. Subclasses say which backend."""

    def __init__(
        self,
        model_dir: str,
        *,
        host: str = "127.0.0.1",
        threads: int = 0,
        max_running_requests: int = 64,
        context_length: int = 4096,
        dtype: str = "float32",
        **options: Any,
    ) -> None:
        self.model_dir = model_dir
        self.host = host
        self.threads = threads
        self.max_running_requests = max_running_requests
        self.context_length = context_length
        self.dtype = dtype
        self.options = options

    @abstractmethod
    def build_backend(self) -> EmbeddedBackend: ...

    def start(self) -> str:
        """Load and serve; the URL. Apart from the constructor, so that an error arrives at the driver as it was."""
        self._backend = self.build_backend()
        self._server = HttpServer(build_app(self._backend), host=self.host)
        return self._server.url

    @ray.method(concurrency_group=cluster.CONTROL)  # type: ignore[untyped-decorator]
    def url(self) -> str:
        return self._server.url

    @ray.method(concurrency_group=cluster.CONTROL)  # type: ignore[untyped-decorator]
    def weight_version(self) -> WeightVersion:
        return self._backend.version

    @ray.method(concurrency_group=cluster.CONTROL)  # type: ignore[untyped-decorator]
    def pause(self, mode: PauseMode) -> None:
        self._backend.scheduler.pause(mode)

    @ray.method(concurrency_group=cluster.CONTROL)  # type: ignore[untyped-decorator]
    def resume(self) -> None:
        self._backend.scheduler.resume()

    def load_weights(self, source: WeightSource) -> WeightVersion:
        return self._backend.load_weights(source)

    def release_memory(self) -> None:
        self._backend.release_memory()

    def resume_memory(self) -> None:
        self._backend.resume_memory()

    @ray.method(concurrency_group=cluster.CONTROL)  # type: ignore[untyped-decorator]
    def abort(self) -> None:
        """End every request with what it has; also answers while weights wait for requests to finish."""
        self._backend.scheduler.abort(lambda sequence: True)

    def stop(self) -> None:
        self._backend.scheduler.close()
        self._server.stop()


class EmbeddedEngine(ServedEngine):
    """Serves a Hugging Face model folder on the CPU."""

    def build_backend(self) -> EmbeddedBackend:
        import torch

        from milepost.engines.embedded_model import EmbeddedModel
        from milepost.engines.tokenizer import load_tokenizer

        # Ray sets OMP_NUM_THREADS=1 for its workers, so the choice is made here; one core is left for HTTP.
        torch.set_num_threads(self.threads or max(1, len(os.sched_getaffinity(0)) - 1))
        trust = bool(self.options.get("trust_remote_code", False))
        model = EmbeddedModel(
            self.model_dir,
            dtype=self.dtype,
            context_length=self.context_length,
            max_rows=self.max_running_requests,
            trust_remote_code=trust,
        )
        text = load_tokenizer(self.model_dir, trust_remote_code=trust)
        return EmbeddedBackend(model, text, model_dir=self.model_dir, max_running_requests=self.max_running_requests)


class FakeEngine(ServedEngine):
    """Serves FakeModel, whose keyword arguments `options` are, with the tokenizer in `model_dir` if there is one."""

    def build_backend(self) -> EmbeddedBackend:
        text: Any = CharacterText()
        vocabulary = {}
        if (Path(self.model_dir) / "tokenizer.json").is_file():
            from milepost.engines.tokenizer import load_tokenizer

            text = load_tokenizer(self.model_dir)
            vocabulary = {"vocab_size": text.vocab_size}
        model = FakeModel(**{"context_length": self.context_length, **vocabulary, **self.options})
        return EmbeddedBackend(model, text, model_dir=self.model_dir, max_running_requests=self.max_running_requests)


class RolloutActor:
    """The driver's side of a rollout engine: RolloutEngine, synchronously, each call with a deadline."""

    def __init__(self, handle: Any, name: str, *, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS) -> None:
        self.name = name
        self._handle = handle
        self._timeout_seconds = timeout_seconds

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

    def resume_memory(self) -> None:
        self._ask("resume_memory")

    def abort(self) -> None:
        self._ask("abort")

    def close(self) -> None:
        """Let responses in flight go out as aborted, then end the actor."""
        stop_serving_actor(self._handle)

    def _ask(self, method: str, *args: Any) -> Any:
        ref = getattr(self._handle, method).remote(*args)
        return cluster.wait(ref, self._timeout_seconds, what=f"{method} of {self.name}")


def engine_name(run: str, index: int) -> str:
    return f"{run}/rollout-{index}"


def start_rollout_engine(
    run: str, index: int, *, engine_class: type[ServedEngine], timeout_seconds: float, **kwargs: Any
) -> RolloutActor:
    """Start an engine of this run and wait until it answers; its own error when it cannot."""
    name = engine_name(run, index)
    handle = cluster.start_actor(engine_class, name, **kwargs)
    wait_until_serving(handle, name, timeout_seconds=timeout_seconds)
    return RolloutActor(handle, name)


def connect_rollout_engine(run: str, index: int) -> RolloutActor:
    """The running engine `index` of a run; LookupError when there is none."""
    name = engine_name(run, index)
    return RolloutActor(cluster.actor(name), name)
