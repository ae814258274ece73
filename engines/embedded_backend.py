"""What HTTP application and Ray actor of an embedded engine share: a model, its scheduler and its weight version."""

import threading
from collections.abc import Callable
from typing import Protocol

from milepost.engines.embedded_batch import Batch, SequenceModel
from milepost.engines.embedded_request import CompletionRequest, Limits
from milepost.engines.embedded_scheduler import Scheduler
from milepost.engines.embedded_sequence import Sequence
from milepost.engines.embedded_update import Update
from milepost.engines.protocols import WeightSource, WeightVersion


class Text(Protocol):
    """Token ids from text and back."""

    eos_ids: frozenset[int]

    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str: ...


class EmbeddedBackend:
    """Methods may be called from any thread. `label` is what responses carry as their weight version."""

    def __init__(self, model: SequenceModel, text: Text, *, model_dir: str, max_running_requests: int) -> None:
        self.text = text
        self.model_dir = model_dir
        self.limits = Limits(model.vocab_size, model.context_length, text.encode)
        self.version: WeightVersion | None = WeightVersion(0, model.weights_digest())
        self._model = model
        self._loading = threading.Lock()  # two updates at once would each name the other's weights
        self.update = Update()
        batch = Batch(model, max_running=max_running_requests, decode=text.decode)
        self.scheduler = Scheduler(batch, version=str(self.version))

    @property
    def label(self) -> str:
        return self.scheduler.version

    def submit(
        self,
        request: CompletionRequest,
        on_finish: Callable[[Sequence], None],
        on_progress: Callable[[Sequence], None] | None = None,
    ) -> Sequence:
        """Start a completion; a response ends at the context length at the latest."""
        params = request.params
        eos_ids = frozenset() if params.ignore_eos else self.text.eos_ids
        room = self.limits.context_length - len(request.input_ids)
        sequence = Sequence(
            request,
            stop_ids=frozenset(id for id in {*eos_ids, *params.stop_token_ids} if id < self.limits.vocab_size),
            max_new_tokens=min(room, params.max_new_tokens or room),
            on_finish=on_finish,
            on_progress=on_progress,
        )
        self.scheduler.submit(sequence)
        return sequence

    def load_weights(self, source: WeightSource) -> WeightVersion:
        """Load a folder whose content has the source's digest; ValueError, and nothing changed, when it has not."""
        with self._loading:
            self.update.drop()
            builds_on = source.base is not None and source.base == self.version
            digest, apply = self._model.stage_weights(
                source.uri, expected_digest=source.version.digest, builds_on=builds_on
            )
            return self._take(apply, WeightVersion(source.version.step, digest), None)

    def load_folder(self, path: str, label: str | None) -> WeightVersion:
        """Load a folder of weights under `label`, a weight version or any name, or as the next step."""
        with self._loading:
            self.update.drop()
            expected, step = None, self.version.step + 1 if self.version else 1
            try:
                named = WeightVersion.parse(label) if label else None
            except ValueError:
                named = None  # any other name
            if named is not None:
                expected, step = named.digest, named.step
            digest, apply = self._model.stage_weights(path, expected_digest=expected)
            self.model_dir = path
            return self._take(apply, WeightVersion(step, digest), label)

    def set_label(self, label: str) -> None:
        """Name the weights of an update that is open; else the weights there are, whatever they were called."""
        if self.update.is_open:
            self.update.label = label
            return
        self.version = None
        self.scheduler.update(lambda: None, label)

    def end_update(self) -> None:
        """Take all that was received since the update began; ValueError, and nothing changed, when it is not right."""
        with self._loading:
            tensors, label = self.update.end()
            version = WeightVersion.parse(label)
            digest, apply = self._model.stage_tensors(tensors, expected_digest=version.digest, uri=f"update {label}")
            self._take(apply, WeightVersion(version.step, digest), label)

    def _take(self, apply: Callable[[], None], version: WeightVersion, label: str | None) -> WeightVersion:
        self.scheduler.update(apply, label or str(version))
        self.version = version
        return version

    def release_memory(self) -> None:
        self.scheduler.set_memory(self._model.release)

    def resume_memory(self) -> None:
        self.scheduler.set_memory(None)
