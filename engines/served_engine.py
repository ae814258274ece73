"""A rollout engine's process: a backend behind its HTTP server, as a Ray actor that is controlled over Ray."""

import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from milepost.engines import cluster
from milepost.engines.app_server import HttpServer
from milepost.engines.embedded_api import build_app
from milepost.engines.embedded_backend import EmbeddedBackend
from milepost.engines.fake_backend import CharacterText, FakeModel
from milepost.engines.observed import Observed
from milepost.engines.protocols import PauseMode, WeightSource, WeightVersion

import ray  # isort: skip  (after cluster, which sets how it authenticates)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Serving:
    """What an engine that has started consists of."""

    backend: EmbeddedBackend
    server: HttpServer


class ServedEngine(Observed, ABC):
    """Ray actor: a backend, its HTTP server, and the methods of RolloutEngine. Subclasses say which backend."""

    def __init__(
        self,
        model_dir: str,
        *,
        host: str = "",
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
        self._serving: Serving | None = None

    @abstractmethod
    def build_backend(self) -> EmbeddedBackend: ...

    def start(self) -> str:
        """Load and serve; the URL. Apart from the constructor, so that an error arrives at the driver as it was."""
        backend = self.build_backend()
        self._serving = Serving(backend, HttpServer(build_app(backend), host=self.host or cluster.own_address()))
        _log.info("serves %s at %s", self.model_dir, self._serving.server.url)
        return self._serving.server.url

    @property
    def _backend(self) -> EmbeddedBackend:
        return self._served().backend

    def _served(self) -> Serving:
        """An engine that takes the place of a dead one has its name before it can serve."""
        if self._serving is None:
            raise cluster.EngineMissing("this engine is still starting: ask again when it serves")
        return self._serving

    @ray.method(concurrency_group=cluster.CONTROL)  # type: ignore[untyped-decorator]
    def url(self) -> str:
        return self._served().server.url

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
        begun = time.monotonic()
        version = self._backend.load_weights(source)
        _log.info("loaded weights %s in %.2f s", version, time.monotonic() - begun)
        return version

    def release_memory(self) -> None:
        self._backend.release_memory()

    def resume_memory(self, tags: Sequence[str] | None = None) -> None:
        self._backend.resume_memory()

    @ray.method(concurrency_group=cluster.CONTROL)  # type: ignore[untyped-decorator]
    def abort(self) -> None:
        """End every request with what it has; also answers while weights wait for requests to finish."""
        self._backend.scheduler.abort(lambda sequence: True)

    def stop(self) -> None:
        if self._serving is not None:
            self._serving.backend.scheduler.close()
            self._serving.server.stop()


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
