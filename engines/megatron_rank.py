"""One rank of the Megatron train engine: it holds its slice of the model and optimizer, and does what all ranks do.

Every method is called on all ranks with the same arguments; rank 0's answer is the engine's.
"""

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state

from milepost.engines import megatron_batch, megatron_checkpoint, megatron_world
from milepost.engines.cpu_shim import CpuRngTracker
from milepost.engines.flops import peak_flops, sample_cost, throughput
from milepost.engines.hf_export import local_path
from milepost.engines.hf_folder import HfFolder
from milepost.engines.losses import get_loss
from milepost.engines.megatron_batch import MicroBatch, micro_batch
from milepost.engines.megatron_memory import Parked, kept_tensors, scratch_tensors
from milepost.engines.megatron_model import build_model, build_optimizer, compiles, device, set_rates, wrap_model
from milepost.engines.megatron_outgoing import OutgoingWeights
from milepost.engines.megatron_reference import ReferenceWeights
from milepost.engines.megatron_step import Passes, denominators
from milepost.engines.megatron_weights import load_weights
from milepost.engines.model_layout import check_layout, read_shape
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
from milepost.engines.schedule import learning_rate
from milepost.engines.weight_exports import Exports
from milepost.storage import files
from milepost.storage.micro_batches import MicroBatches, micro_batches, packing_rules
from milepost.storage.parameters import SyncSection
from milepost.storage.schema import ROLLOUTS
from milepost.storage.tables import TableRef, read_table, with_columns, write_table

if TYPE_CHECKING:
    from milepost.engines.train_actors import TrainSetup


class MegatronRank:
    """A rank from its start to its end. `connect` builds the model; nothing else may be called before it."""

    def __init__(self, rank: int, world: int, setup: "TrainSetup") -> None:
        self._rank, self._world, self._setup = rank, world, setup
        self._reference_dir = setup.reference_dir or setup.model_dir
        self._threads = megatron_world.thread_count(setup.perf.train_threads, world)
        self._tracker = CpuRngTracker()
        self._store: Any = None
        self._progress = megatron_checkpoint.Progress()
        self._results: dict[str, UpdateResult] = {}
        self._reference_digest = ""
        self._version: WeightVersion | None = None  # of the weights as they are now, once known
        self._parked = Parked()
        self.is_resting = False
        self._leaving = contextlib.ExitStack()

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        resting = self.is_resting
        self.resume_memory()
        try:
            with megatron_world.on_device(self._threads, self._tracker):
                yield
        finally:
            if resting:
                self.release_memory()

    def rendezvous(self) -> tuple[str, int]:
        """Where the ranks meet; asked of rank 0."""
        address = megatron_world.own_address()
        self._store = megatron_world.open_store(address, self._world)
        return address, self._store.port

    def connect(self, address: str, port: int) -> None:
        """Join the other ranks and load this rank's slice of the model."""
        megatron_world.require_given_gpu()
        hf_config = files.read_json(files.join(self._setup.model_dir, "config.json"))
        check_layout(hf_config, self._setup.model)
        self._shape = read_shape(hf_config)
        self._packing = packing_rules(self._setup.model, self._setup.perf)
        self._cost = sample_cost(self._shape, self._packing.balance)
        megatron_world.keep_to_loopback(address)
        if self._store is None:
            self._store = megatron_world.find_store(address, port, self._world)
        with self._working():
            megatron_world.join_world(self._store, rank=self._rank, world=self._world, model=self._setup.model)
            megatron_world.seed_streams(self._setup.seed)
            self._gpt = build_model(self._shape, self._setup.model, self._setup.perf)
            load_weights(self._gpt, self._shape, HfFolder(self._setup.model_dir))
            self._reference = ReferenceWeights(self._gpt, self._shape, self._reference_dir)
            self._model = wrap_model(self._gpt)
            self._optimizer = build_optimizer(self._model, self._setup.optimizer, self._setup.perf)
            compiled = compiles(self._setup.perf)
            self._passes = Passes(self._model, self._shape, self._setup.temperature, compiled=compiled)
        exports = Exports(self._setup.model_dir, self._setup.perf.dtype)
        self._outgoing = OutgoingWeights(self._gpt, self._shape, exports)
        self._leaving.callback(self._outgoing.close)

    def release_memory(self) -> None:
        """See TrainEngine; on a CPU there is nothing to give up."""
        self.is_resting = True
        if torch.cuda.is_available():
            self._optimizer.zero_grad()
            self._parked.release(kept_tensors(self._gpt, self._optimizer), scratch_tensors(self._optimizer))

    def resume_memory(self) -> None:
        self.is_resting = False
        self._parked.resume()

    def close(self) -> None:
        """Leave the other ranks, and engines, so that this process may join others."""
        self._leaving.close()
        megatron_world.leave_world()
        self._store = None

    def _cut(self, samples: list[megatron_batch.Sample], names: list[str], rows: MicroBatches) -> list[MicroBatch]:
        """This rank's micro-batches, with the columns `names`."""
        known = {sample.row: sample for sample in samples}
        packing, ranks = rows.rules.packing, megatron_world.row_split(self._setup.model)
        return [
            micro_batch([known[row] for row in part], names, device(), packing=packing, ranks=ranks)
            for part in rows.rows[parallel_state.get_data_parallel_rank()]
        ]

    def logprobs(self, batch: TableRef, role: Role, uri: str) -> TableRef | None:
        """See TrainEngine; None on all ranks but rank 0."""
        table = read_table(batch)
        samples = megatron_batch.read_samples(table, self._shape.vocab)
        rows = micro_batches({sample.row: sample.tokens for sample in samples}, self._packing, self._cost)
        with self._working(), self._weights_of(role):
            found = self._passes.logprobs(self._cut(samples, [], rows))
        if self._rank != 0:
            return None
        column = "old_logprobs" if role == "policy" else "ref_logprobs"
        values: list[object] = [found[row] if row in found else [] for row in range(table.num_rows)]
        return write_table(uri, with_columns(table, {column: values}), ROLLOUTS)

    def _weights_of(self, role: Role, *, keep: bool = True) -> contextlib.AbstractContextManager[None]:
        """A block in which the model has the weights of that role."""
        if role == "policy" or self._is_reference:
            return contextlib.nullcontext()
        return self._reference.in_place(keep=keep)

    @property
    def _is_reference(self) -> bool:
        """Whether the model is the reference because nothing else was loaded or trained since."""
        return not (self._progress.optimizer_steps or self._progress.renewed or self._setup.reference_dir)

    def renew_reference(self, name: str) -> None:
        """See TrainEngine."""
        if self._progress.renewed == name:
            return
        with self._working():
            self._began_with()  # while that can still be told
            self._reference.take()
        self._progress = replace(self._progress, renewed=name)

    def step(self, batch: TableRef, update: UpdateParams, key: str) -> UpdateResult:
        """See TrainEngine. The weights change only when there is a loss, and it and the gradient are finite."""
        if key in self._results:
            return self._results[key]
        loss, started = get_loss(update.loss), time.monotonic()
        samples = megatron_batch.trained_samples(read_table(batch), self._shape.vocab)
        if not samples:
            return self._record(key, False, {"samples": 0.0})
        lengths = {sample.row: sample.tokens for sample in samples}
        rows = micro_batches(lengths, self._packing, self._cost)
        rate = learning_rate(self._progress.optimizer_steps, self._setup.optimizer)
        with self._working():
            batches = self._cut(samples, megatron_batch.loss_columns(samples), rows)
            self._model.zero_grad_buffer()
            self._optimizer.zero_grad()
            metrics = self._passes.gradients(batches, loss, update.params, denominators(samples))
            norm = self._apply(metrics["loss"], rate)
        applied = math.isfinite(norm) and math.isfinite(metrics["loss"])
        metrics |= {"grad_norm": norm, "lr": rate, **self._speed(samples, time.monotonic() - started)}
        return self._record(key, applied, metrics | rows.metrics(lengths), rows.to_json())

    def _speed(self, samples: list[megatron_batch.Sample], seconds: float) -> dict[str, float]:
        peak = None
        if torch.cuda.is_available():
            peak = peak_flops(torch.cuda.get_device_name(), self._setup.perf.dtype)
        return throughput(self._shape, [sample.tokens for sample in samples], seconds, ranks=self._world, peak=peak)

    def _apply(self, loss: float, rate: float) -> float:
        """Take the optimizer step if loss and gradient are finite; the norm of the gradient before clipping."""
        self._optimizer.prepare_grads()
        norm = float(self._optimizer.get_grad_norm())
        if math.isfinite(norm) and math.isfinite(loss):
            set_rates(self._optimizer, lr=rate, weight_decay=self._setup.optimizer.weight_decay)
            self._optimizer.step()
        return norm

    def _record(
        self, key: str, applied: bool, metrics: dict[str, float], rows: dict[str, Any] | None = None
    ) -> UpdateResult:
        steps = self._progress.optimizer_steps + applied
        result = UpdateResult(key, applied, steps, metrics, rows)
        self._results[key] = result
        self._progress = replace(self._progress, optimizer_steps=steps, last=result)
        self._version = None if applied else self._version
        return result

    def digest(self) -> str:
        """See TrainEngine."""
        with self._working():
            return self._outgoing.digest()

    def weights(self, uri: str, step: int, kind: ExportKind = "full") -> WeightSource:
        with self._working():
            digest = self._outgoing.write(uri, kind)
        self._named(WeightVersion(step, digest))
        return self._outgoing.written(uri, WeightVersion(step, digest))

    def export(self, uri: str, version: WeightVersion) -> WeightSource | None:
        return self.weights(uri, version.step) if self._version == version else None

    def push(self, urls: Sequence[str], step: int, sync: SyncSection) -> PushReport | None:
        """See TrainEngine; None on all ranks but rank 0."""
        asked = time.monotonic()
        with self._working():
            awake = time.monotonic()
            version = WeightVersion(step, self._outgoing.digest())
            digested = time.monotonic()
            self._named(version)
            report = self._outgoing.push(urls, version, sync)
        if report is None:
            return None
        spent = {"wake_seconds": awake - asked, "digest_seconds": digested - awake, "seconds": time.monotonic() - asked}
        return replace(report, metrics=report.metrics | spent)

    def _named(self, version: WeightVersion) -> None:
        """Take `version` as the name of the weights as they are."""
        self._version = version
        if self._is_reference:
            self._reference_digest = version.digest

    def _began_with(self) -> str:
        """Digest of the weights that the reference role answers from until it is renewed."""
        if not self._reference_digest:
            with self._weights_of("reference", keep=False):
                self._reference_digest = self._outgoing.digest()
        return self._reference_digest

    def _current_version(self) -> WeightVersion:
        """The version last exported while the weights are still those, else the count of optimizer steps."""
        if self._version is None:
            self._version = WeightVersion(self._progress.optimizer_steps, self._outgoing.digest())
        return self._version

    def save(self, uri: str) -> CheckpointRef:
        folder, last = local_path(uri), self._progress.last
        with self._working():
            version = self._current_version()
            progress = replace(self._progress, reference=self._began_with())
            megatron_checkpoint.save_state(folder, self._gpt, self._optimizer, progress, self._reference)
            layout = megatron_checkpoint.layout()
        return CheckpointRef(uri, version, last.key if last else "", layout)

    def restore(self, ref: CheckpointRef) -> None:
        """Go back to a checkpoint; batches applied after it count as not applied."""
        with self._working():
            reference = self._began_with()
            self._progress = megatron_checkpoint.load_state(
                local_path(ref.uri), self._gpt, self._optimizer, self._reference
            )
            self._version = None
            found = self._current_version().digest
        last = self._progress.last
        self._results = {last.key: last} if last else {}
        if found != ref.version.digest:
            raise megatron_checkpoint.DamagedCheckpoint(
                f"checkpoint {ref.uri} holds weights {found[:16]}, not {ref.version.digest[:16]}: it is another one"
            )
        if reference != self._progress.reference:
            key = "reference.path" if self._setup.reference_dir else "model.path"
            raise ValueError(
                f"checkpoint {ref.uri} has the reference weights {self._progress.reference[:16]}, "
                f"{self._reference_dir!r} holds {reference[:16]}: give {key} the model it was trained with"
            )
        self._version = ref.version
