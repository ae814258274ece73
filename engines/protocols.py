"""What callers may ask of an engine. An embedded engine, a fake and a real one cannot be told apart through these."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from milepost.storage.checkpoints import CheckpointRef as CheckpointRef
from milepost.storage.parameters import SyncSection
from milepost.storage.tables import TableRef
from milepost.storage.weight_version import WeightVersion as WeightVersion

PauseMode = Literal["retract", "in_place", "abort"]
Role = Literal["policy", "reference"]
ExportKind = Literal["full", "delta"]
VALUE_LOSS = "value"


@dataclass(frozen=True)
class WeightSource:
    """Weights to load: a folder whose content has `version.digest`.

    It is a Hugging Face folder of safetensors or, when it has a `base`, what changed since those weights: see
    engines/weight_delta.py.
    """

    uri: str
    version: WeightVersion
    base: WeightVersion | None = None

    @staticmethod
    def parse(content: dict[str, Any]) -> "WeightSource":
        """From `dataclasses.asdict`, by way of JSON."""
        base = content.get("base")
        return WeightSource(
            content["uri"], WeightVersion(**content["version"]), WeightVersion(**base) if base is not None else None
        )


@dataclass(frozen=True)
class PushReport:
    """Weights that were sent into engines. Those in `failed`, with the reason, must load a folder before they serve."""

    version: WeightVersion
    failed: dict[str, str]
    metrics: dict[str, float]


@dataclass(frozen=True)
class GenerateRequest:
    """One completion wanted, in SGLang's terms. `sampling` is the body of `sampling_params`."""

    sample_id: str
    input_ids: list[int]
    sampling: dict[str, Any]


@dataclass(frozen=True)
class Completion:
    """One completion. `logprobs` are of the sampled tokens at the request's temperature, one per output id."""

    text: str
    output_ids: list[int]
    logprobs: list[float]
    finish_reason: Literal["stop", "length", "abort"]
    weight_version_first: WeightVersion
    weight_version_last: WeightVersion


@dataclass(frozen=True)
class UpdateParams:
    """The loss of a batch. `params` are its keyword arguments (clip_low, aggregation, ...), with JSON values.

    The critic has one loss only, VALUE_LOSS. `optimizer` is the section that the step is taken under, whatever the
    engine was built with: a batch that is applied again comes to the same. Empty for what the engine was built with.
    """

    loss: str
    params: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class UpdateResult:
    """What a step did. `applied` is false when the weights did not change.

    They do not when loss or gradient were not finite, or when the batch `is_empty`. `micro_batches` is how it was cut,
    as storage/micro_batches.py writes it; None where nothing was, or a trainer does not say. A metric that is not
    finite is left out: JSON, and so every record of it, has no such number.
    """

    key: str
    applied: bool
    optimizer_step: int
    metrics: dict[str, float]
    micro_batches: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        finite = {name: value for name, value in self.metrics.items() if math.isfinite(value)}
        object.__setattr__(self, "metrics", finite)

    @property
    def is_empty(self) -> bool:
        """Whether no sample of the batch had a token to train."""
        return self.metrics.get("samples") == 0


class Generate(Protocol):
    """Data plane: what a rollout function sees."""

    async def __call__(self, request: GenerateRequest) -> Completion: ...


class RolloutEngine(Protocol):
    """Control plane of one rollout engine. Generation itself goes over HTTP to `url`."""

    def url(self) -> str: ...
    def weight_version(self) -> WeightVersion | None: ...
    def pause(self, mode: PauseMode) -> None: ...
    def resume(self) -> None: ...
    def load_weights(self, source: WeightSource) -> WeightVersion: ...
    def release_memory(self) -> None: ...
    def resume_memory(self, tags: Sequence[str] | None = None) -> None:
        """Take memory back: all of it, or only that of the parts `tags` names (`weights`, `kv_cache`)."""
        ...


class WeightHolder(Protocol):
    """Whatever has the weights that rollout engines are to serve."""

    def weights(self, uri: str, step: int, kind: ExportKind = "full") -> WeightSource:
        """Export the weights as a Hugging Face folder at `uri`, as version `step`.

        `delta` writes what changed since the last export of this kind instead, when there is one to build on.
        """
        ...

    def export(self, uri: str, version: WeightVersion) -> WeightSource | None:
        """Export the weights once more as they were named, or None when they are not `version` any more."""
        ...

    def push(self, urls: Sequence[str], step: int, sync: SyncSection) -> PushReport:
        """Send the weights, as version `step`, into the paused engines at `urls`, by `sync.transport`."""
        ...


class TrainEngine(WeightHolder, Protocol):
    """A model under training, and its critic if it has one, over any number of ranks."""

    def logprobs(self, batch: TableRef, role: Role, uri: str) -> TableRef:
        """The batch with `old_logprobs` (policy) or `ref_logprobs` (reference) filled, written under `uri`.

        Log-probabilities are taken at the temperature the engine was built with, the one samples are drawn at. The
        reference is the model the engine was built with for that, until it is renewed.
        """
        ...

    def values(self, batch: TableRef, uri: str) -> TableRef:
        """The batch with `values` filled by the critic, written under `uri`.

        Each is of the state before a response token, the one that its log-probability is taken in.
        """
        ...

    def renew_reference(self, name: str) -> None:
        """Let the policy, as it is now, be the reference from now on, under `name`, also in what is saved.

        A name that it was renewed under last does nothing.
        """
        ...

    def step(self, batch: TableRef, update: UpdateParams, key: str) -> UpdateResult:
        """One optimizer step on the whole batch. A key that was applied before returns its recorded result."""
        ...

    def critic_step(self, batch: TableRef, update: UpdateParams, key: str) -> UpdateResult | None:
        """One optimizer step of the critic on the whole batch, as `step` is the policy's; its keys are its own.

        Nothing, and None, of an engine without a critic: one that has taken up a run under other parameters.
        """
        ...

    def digest(self) -> str:
        """The content digest of the weights as they are, as in the version they are exported under."""
        ...

    def save(self, uri: str) -> CheckpointRef:
        """Write the whole state under `uri`, durably. It is a checkpoint once storage.checkpoints has published it."""
        ...

    def release_memory(self) -> None:
        """Give the GPU's memory up until `resume_memory`; a call meanwhile takes it back for as long as it lasts."""
        ...

    def resume_memory(self) -> None: ...

    def restore(self, ref: CheckpointRef) -> None:
        """Take up the state of a published checkpoint; batches applied after it count as not applied.

        DamagedCheckpoint when a file or a part of the state is missing or has changed; nothing starts fresh, but a
        critic where none was trained when the checkpoint was saved.
        """
        ...
