"""A rollout engine that is an SGLang server: started here or attached to, and controlled as every engine is.

The label that the server stamps on samples names weights only while they are whole: while they change, and when a
change failed, it is a name that no router accepts.
"""

import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from milepost.engines import cluster
from milepost.engines.observed import Observed
from milepost.engines.protocols import PauseMode, WeightSource, WeightVersion
from milepost.engines.sglang_client import SglangRefused, ask, listens
from milepost.engines.sglang_flags import CPU_FLAGS, Value, command_line, environment, interpreter, known_flags
from milepost.engines.sglang_server import PROBE_SECONDS, SglangServer, log_file
from milepost.storage.redaction import masked_text

import ray  # isort: skip  (after cluster, which sets how it authenticates)

# SGLang keeps six tokens of its context to itself; as many positions more than the model has are never used.
RESERVED_TOKENS = 6
MEMORY_TAGS = ("kv_cache", "weights", "cuda_graph")
CHANGING = "changing"
_log = logging.getLogger(__name__)


class SglangEngine(Observed):
    """Ray actor: one SGLang server, and the methods of RolloutEngine over its HTTP API."""

    def __init__(
        self,
        model_dir: str,
        *,
        host: str = "",
        threads: int = 0,
        max_running_requests: int = 64,
        context_length: int = 4096,
        dtype: str = "float32",
        python: str = "",
        flags: Mapping[str, Value] | None = None,
        attach_url: str = "",
        trust_remote_code: bool = False,
        gpu: bool = False,
        tensor_parallel: int = 1,
        call_seconds: float = 600.0,
        start_seconds: float = 600.0,
    ) -> None:
        """Without `gpu` the server is one on the CPU. With `attach_url` nothing is started, and nothing ended."""
        self._model_dir = model_dir
        self._host = host
        self._threads = threads
        self._python = interpreter(python)
        self._gpu = gpu
        self._attach_url = attach_url.rstrip("/")
        self._call_seconds, self._start_seconds = call_seconds, start_seconds
        own: dict[str, Value] = {
            "model_path": model_dir,
            "dtype": dtype,
            "context_length": context_length + RESERVED_TOKENS,
            "max_running_requests": max_running_requests,
            "tp_size": tensor_parallel,
            "trust_remote_code": trust_remote_code,
        }
        self._flags = ({} if self._gpu else CPU_FLAGS) | dict(flags or {}) | own
        self._server: SglangServer | None = None
        self._log_file: Path | None = None
        self._url = ""
        self._version: WeightVersion | None = None
        self._paused: PauseMode | None = None
        self._released: set[str] = set()
        self._loading = threading.Lock()  # two updates at once would each name the other's weights

    def log_to(self, path: str) -> None:
        """The server has a file of its own beside that of this process."""
        super().log_to(path)
        self._log_file = Path(path).with_name(f"{Path(path).stem}-sglang.log")

    def start(self) -> str:
        """Serve; the URL. Apart from the constructor, so that an error arrives at the driver as it was."""
        self._deadline = time.monotonic() + self._start_seconds
        answer: Any = self._attached() if self._attach_url else self._started()
        meta = answer["meta_info"]
        # One that does not say which weights made which token would name the newest for all of them.
        self._tells_spans = "weight_versions" in meta
        info = self._ask("/server_info")
        self._shares_prefixes = not info.get("disable_radix_cache", False)
        self._keeps_weights = not info.get("enable_memory_saver") or bool(info.get("enable_weights_cpu_backup"))
        _log.info("SGLang serves %s at %s", self._model_dir, self._url)
        return self._url

    @ray.method(concurrency_group=cluster.CONTROL)  # type: ignore[untyped-decorator]
    def url(self) -> str:
        """An engine that takes the place of a dead one has its name before it can serve.

        A server that was attached to ends without this process, and another in its place has other weights.
        """
        if not self._url:
            raise cluster.EngineMissing("this engine is still starting: ask again when it serves")
        if self._attach_url and not listens(self._url):
            raise cluster.EngineMissing(f"no SGLang server is at {masked_text(self._url)}: start it again")
        return self._url

    @ray.method(concurrency_group=cluster.CONTROL)  # type: ignore[untyped-decorator]
    def weight_version(self) -> WeightVersion | None:
        """What the server says that it holds; None for a label that is no version. Pushed weights have 16 digits."""
        self.url()
        label = self._ask("/model_info").get("weight_version")
        if self._version is not None and label == str(self._version):
            return self._version
        try:
            return WeightVersion.parse(str(label))
        except ValueError:
            return None

    @ray.method(concurrency_group=cluster.CONTROL)  # type: ignore[untyped-decorator]
    def pause(self, mode: PauseMode) -> None:
        self._paused = mode if self._tells_spans else "abort"
        self._ask("/pause_generation", {"mode": self._paused})

    @ray.method(concurrency_group=cluster.CONTROL)  # type: ignore[untyped-decorator]
    def resume(self) -> None:
        self._paused = None
        if not self._released:
            self._ask("/continue_generation", {})

    @ray.method(concurrency_group=cluster.CONTROL)  # type: ignore[untyped-decorator]
    def abort(self) -> None:
        """End every request with what it has; also answers while weights wait for requests to finish."""
        self._ask("/abort_request", {"rid": "", "abort_all": True})

    def load_weights(self, source: WeightSource) -> WeightVersion:
        """Load a folder whose content has the source's digest; ValueError, and nothing changed, when it has not."""
        from milepost.engines.sglang_weights import check_folder
        from milepost.engines.weight_chain import materialise

        with self._loading:
            if "weights" in self._released:
                raise ValueError("the memory of the weights is released: resume_memory first")
            in_place = self._paused == "in_place"
            if in_place and self._shares_prefixes:
                raise ValueError(
                    "pausing in_place keeps what older weights cached: set engines.sglang.disable_radix_cache, or "
                    "sync.pause_mode to retract"
                )
            folder = source.uri if source.base is None else materialise(source, self._cache())
            check_folder(folder, like=self._model_dir, digest=source.version.digest)
            self._label(CHANGING)
            # Requests paused in place hold their cache, which cannot be flushed then and is not shared with others.
            body = {"model_path": folder, "weight_version": str(source.version), "flush_cache": not in_place}
            self._ask("/update_weights_from_disk", body)
            self._version = source.version
        _log.info("loaded weights %s", source.version)
        return source.version

    def release_memory(self, tags: Sequence[str] | None = None) -> None:
        """Give memory up, by SGLang's tags. Generation pauses for it; weights are lost unless the server backs them up.

        Needs `engines.sglang.enable_memory_saver` to free anything.
        """
        wanted = [tag for tag in tags or MEMORY_TAGS if tag not in self._released]
        if not wanted:
            return
        # The server dies of a release while requests run.
        self._ask("/pause_generation", {"mode": "retract" if self._tells_spans else "abort"})
        if "weights" in wanted and not self._keeps_weights:
            self._label(CHANGING)
        self._ask("/release_memory_occupation", {"tags": wanted})
        self._released |= set(wanted)

    def resume_memory(self, tags: Sequence[str] | None = None) -> None:
        """Take memory back; generation continues once all of it is there, unless it was paused before."""
        # The server dies of a tag that it did not release.
        wanted = [tag for tag in tags or MEMORY_TAGS if tag in self._released]
        if wanted:
            self._ask("/resume_memory_occupation", {"tags": wanted})
            self._released -= set(wanted)
            if not self._released and self._paused is None:
                self._ask("/continue_generation", {})

    def stop(self) -> None:
        """Let responses in flight go out as aborted, and end the server if it was started here."""
        if self._server is not None:
            try:
                self.abort()
            except (ConnectionError, SglangRefused):
                pass  # it is to end anyway
            self._server.stop()

    def _started(self) -> object:
        from milepost.engines.sglang_weights import folder_digest

        known = known_flags(self._python)
        version = WeightVersion(0, folder_digest(self._model_dir))
        arguments = command_line(self._flags | {"weight_version": str(version)}, known)
        variables = environment(gpu=self._gpu) | {
            # A probe must not queue behind a pause; whether the scheduler lives, its process says.
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
            # Ray sets this to 1 for its workers; one core is left for HTTP.
            "OMP_NUM_THREADS": str(self._threads or max(1, len(os.sched_getaffinity(0)) - 1)),
        }
        self._server = SglangServer(
            [self._python, "-m", "sglang.launch_server", *arguments],
            host=self._host or cluster.own_address(),
            environment=variables,
            log=self._log_file or log_file(_actor_name()),
            timeout_seconds=self._deadline - time.monotonic(),
            on_death=_end_this_process,
        )
        self._url, self._version = self._server.url, version
        return self._server.first_answer

    def _attached(self) -> object:
        self._url = self._attach_url
        probe = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
        return ask(self._url, "/generate", probe, timeout_seconds=PROBE_SECONDS)

    def _cache(self) -> Path:
        """Where the full weights of a source that holds changes are put together."""
        folder = log_file(_actor_name()).with_suffix(".weights")
        folder.mkdir(exist_ok=True)
        return folder

    def _label(self, name: str) -> None:
        self._ask("/update_weight_version", {"new_version": name, "abort_all_requests": False})

    def _ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        return ask(self._url, path, body, timeout_seconds=self._call_seconds)


def _actor_name() -> str:
    return str(ray.get_runtime_context().get_actor_name())


def _end_this_process() -> None:
    """An engine without its server is a dead engine: whoever watches it starts another."""
    _log.error("the SGLang server ended, and this engine with it")
    os._exit(1)
