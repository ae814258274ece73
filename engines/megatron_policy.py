"""The policy as one rank has it: a model under training, what its weights are called, and the reference beside it.

Every method is called on all ranks; they stay in step without talking about it.
"""

import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from milepost.engines.hf_folder import HfFolder
from milepost.engines.loss_inputs import Denominators
from milepost.engines.losses import get_loss
from milepost.engines.megatron_batch import MicroBatch, Sample, loss_columns
from milepost.engines.megatron_model import build_model, compiles
from milepost.engines.megatron_outgoing import OutgoingWeights
from milepost.engines.megatron_passes import OfTokens
from milepost.engines.megatron_reference import ReferenceWeights
from milepost.engines.megatron_step import PolicyPasses
from milepost.engines.megatron_trained import TrainedModel
from milepost.engines.megatron_weights import load_weights
from milepost.engines.model_layout import ModelShape
from milepost.engines.protocols import ExportKind, PushReport, Role, UpdateParams, WeightSource, WeightVersion
from milepost.engines.weight_exports import Exports
from milepost.storage.parameters import SyncSection

if TYPE_CHECKING:
    from milepost.engines.train_actors import TrainSetup


class Policy:
    """This rank's slice of it, as it is when a run begins."""

    def __init__(self, setup: "TrainSetup", shape: ModelShape) -> None:
        gpt = build_model(shape, setup.model, setup.perf)
        load_weights(gpt, shape, HfFolder(setup.model_dir))
        self.shape = shape
        self._has_own_reference = bool(setup.reference_dir)
        self.reference = ReferenceWeights(gpt, shape, setup.reference_dir or setup.model_dir)
        self.model = TrainedModel(gpt, setup.optimizer, setup.perf)
        self._passes = PolicyPasses(self.model.wrapped, shape, setup.temperature, compiled=compiles(setup.perf))
        self._outgoing = OutgoingWeights(gpt, shape, Exports(setup.model_dir, setup.perf.dtype))
        self._named: tuple[int, WeightVersion] | None = None  # after so many optimizer steps

    def logprobs(self, batches: list[MicroBatch], role: Role) -> OfTokens:
        """See PolicyPasses."""
        with self._weights_of(role):
            return self._passes.logprobs(batches)

    def columns(self, samples: list[Sample]) -> list[str]:
        """What of a batch its loss is made of."""
        return loss_columns(samples)

    def gradients(self, batches: list[MicroBatch], update: UpdateParams, whole: Denominators) -> dict[str, float]:
        """See PolicyPasses."""
        return self._passes.gradients(batches, get_loss(update.loss), update.params, whole)

    def _weights_of(self, role: Role, *, keep: bool = True) -> contextlib.AbstractContextManager[None]:
        """A block in which the model has the weights of that role."""
        if role == "policy" or self._is_reference:
            return contextlib.nullcontext()
        return self.reference.in_place(keep=keep)

    @property
    def _is_reference(self) -> bool:
        """Whether the model is the reference because nothing else was loaded or trained since."""
        return not (self.model.progress.optimizer_steps or self.reference.renewed or self._has_own_reference)

    def renew_reference(self, name: str) -> None:
        """See TrainEngine."""
        self.began_with()  # while that can still be told
        self.reference.take()
        self.reference.renewed = name

    def began_with(self) -> str:
        """Digest of the weights that the reference role answers from until it is renewed."""
        if not self.reference.began:
            with self._weights_of("reference", keep=False):
                self.reference.began = self._outgoing.digest()
        return self.reference.began

    @property
    def version(self) -> WeightVersion | None:
        """What the weights as they are were called last, if they were."""
        steps, version = self._named or (-1, None)
        return version if steps == self.model.progress.optimizer_steps else None

    def call(self, version: WeightVersion) -> WeightVersion:
        """Take `version` as the name of the weights as they are."""
        self._named = self.model.progress.optimizer_steps, version
        if self._is_reference:
            self.reference.began = version.digest
        return version

    def current_version(self) -> WeightVersion:
        """What they were called last, else a name by the count of optimizer steps."""
        return self.version or self.call(WeightVersion(self.model.progress.optimizer_steps, self.digest()))

    def restored(self) -> str:
        """The weights are others now, with the name that they had forgotten; their digest."""
        self._named = None
        return self.current_version().digest

    def digest(self) -> str:
        return self._outgoing.digest()

    def write(self, uri: str, step: int, kind: ExportKind) -> WeightSource:
        """See TrainEngine.weights."""
        version = self.call(WeightVersion(step, self._outgoing.write(uri, kind)))
        return self._outgoing.written(uri, version)

    def push(self, urls: Sequence[str], step: int, sync: SyncSection) -> PushReport | None:
        """See TrainEngine; None on all ranks but rank 0."""
        begun = time.monotonic()
        version = self.call(WeightVersion(step, self.digest()))
        digested = time.monotonic()
        report = self._outgoing.push(urls, version, sync)
        return report and replace(report, metrics=report.metrics | {"digest_seconds": digested - begun})

    def close(self) -> None:
        self._outgoing.close()
