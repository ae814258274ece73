"""One rank of the Megatron train engine: it holds its slice of the models, and does what all ranks do.

Every method is called on all ranks with the same arguments; rank 0's answer is the engine's.
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from milepost.engines import megatron_checkpoint, megatron_model_state, megatron_world
from milepost.engines.cpu_shim import CpuRngTracker
from milepost.engines.flops import peak_flops, throughput
from milepost.engines.hf_export import local_path
from milepost.engines.megatron_batch import MicroBatch, Sample, read_samples, trained_samples
from milepost.engines.megatron_critic import Critic
from milepost.engines.megatron_cut import Cutter
from milepost.engines.megatron_memory import Parked
from milepost.engines.megatron_passes import OfTokens
from milepost.engines.megatron_policy import Policy
from milepost.engines.megatron_step import denominators
from milepost.engines.megatron_trained import Progress, TrainedModel
from milepost.engines.model_layout import ModelShape, check_layout, read_shape
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
from milepost.storage import files
from milepost.storage.parameters import SyncSection
from milepost.storage.schema import ROLLOUTS
from milepost.storage.tables import TableRef, read_table, with_columns, write_table

if TYPE_CHECKING:
    from milepost.engines.train_actors import TrainSetup


class MegatronRank:
    """A rank from its start to its end. `connect` builds the models; nothing else may be called before it."""

    def __init__(self, rank: int, world: int, setup: "TrainSetup") -> None:
        self._rank, self._world, self._setup = rank, world, setup
        self._threads = megatron_world.thread_count(setup.perf.train_threads, world)
        self._tracker = CpuRngTracker()
        self._store: Any = None
        self._critic: Critic | None = None
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
        setup = self._setup
        hf_config = files.read_json(files.join(setup.model_dir, "config.json"))
        check_layout(hf_config, setup.model)
        self._shape = shape = read_shape(hf_config)
        self._cutter = Cutter(shape, setup.model, setup.perf)
        megatron_world.keep_to_loopback(address)
        if self._store is None:
            self._store = megatron_world.find_store(address, port, self._world)
        with self._working():
            megatron_world.join_world(self._store, rank=self._rank, world=self._world, model=setup.model)
            megatron_world.seed_streams(setup.seed)
            self._policy = Policy(setup, shape)
            self._critic = self._new_critic()
        self._leaving.callback(self._policy.close)

    def _new_critic(self) -> Critic | None:
        """The critic as a run begins with it, if it has one."""
        setup = self._setup
        return Critic(setup.critic, self._shape, setup.model, setup.perf) if setup.critic else None

    @property
    def _state(self) -> megatron_checkpoint.TrainerState:
        critic = self._critic.model if self._critic else None
        return megatron_checkpoint.TrainerState(self._policy.model, critic, self._policy.reference)

    def release_memory(self) -> None:
        """See TrainEngine; on a CPU there is nothing to give up."""
        self.is_resting = True
        if torch.cuda.is_available():
            self._park()

    def _park(self) -> None:
        models = self._state.models
        for model in models:
            model.optimizer.zero_grad()
        kept, scratch = ([tensors(model) for model in models] for tensors in (TrainedModel.kept, TrainedModel.scratch))
        self._parked.release(itertools.chain(*kept), itertools.chain(*scratch))

    def resume_memory(self) -> None:
        self.is_resting = False
        self._parked.resume()

    def close(self) -> None:
        """Leave the other ranks, and engines, so that this process may join others."""
        self._leaving.close()
        megatron_world.leave_world()
        self._store = None

    def logprobs(self, batch: TableRef, role: Role, uri: str) -> TableRef | None:
        """See TrainEngine; None on all ranks but rank 0."""
        column = "old_logprobs" if role == "policy" else "ref_logprobs"
        return self._filled(batch, column, uri, lambda batches: self._policy.logprobs(batches, role))

    def values(self, batch: TableRef, uri: str) -> TableRef | None:
        """See TrainEngine; None on all ranks but rank 0."""
        if self._critic is None:
            raise ValueError("this trainer has no critic to ask for values: set algorithm.advantage=gae")
        return self._filled(batch, "values", uri, self._critic.values)

    def _filled(
        self, batch: TableRef, column: str, uri: str, find: Callable[[list[MicroBatch]], OfTokens]
    ) -> TableRef | None:
        """The table with what `find` says of every response token."""
        table = read_table(batch)
        cut = self._cutter.cut(read_samples(table, self._shape.vocab))
        with self._working():
            found = find(self._cutter.own(cut))
        if self._rank != 0:
            return None
        values: list[object] = [found[row] if row in found else [] for row in range(table.num_rows)]
        return write_table(uri, with_columns(table, {column: values}), ROLLOUTS)

    def renew_reference(self, name: str) -> None:
        """See TrainEngine."""
        if self._policy.reference.renewed != name:
            with self._working():
                self._policy.renew_reference(name)

    def step(self, batch: TableRef, update: UpdateParams, key: str) -> UpdateResult:
        """See TrainEngine. The weights change only when there is a loss, and it and the gradient are finite."""
        return self._learn(self._policy, batch, update, key)

    def critic_step(self, batch: TableRef, update: UpdateParams, key: str) -> UpdateResult | None:
        """See TrainEngine."""
        return self._learn(self._critic, batch, update, key) if self._critic else None

    def _learn(self, learner: Policy | Critic, batch: TableRef, update: UpdateParams, key: str) -> UpdateResult:
        """One optimizer step on the samples that have a token to train, if there are any, unless `key` took it."""
        model, started = learner.model, time.monotonic()
        if known := model.result(key):
            return known
        samples = trained_samples(read_table(batch), self._shape.vocab)
        if not samples:
            return model.record(key, False, {"samples": 0.0})
        cut, names, whole = self._cutter.cut(samples), learner.columns(samples), denominators(samples)
        with self._working():
            batches = self._cutter.own(cut, names)
            applied, metrics = model.learn(lambda: learner.gradients(batches, update, whole), update.optimizer)
        metrics |= self._speed(learner.shape, samples, time.monotonic() - started)
        return model.record(key, applied, metrics | cut.metrics, cut.rows.to_json())

    def _speed(self, shape: ModelShape, samples: list[Sample], seconds: float) -> dict[str, float]:
        peak = None
        if torch.cuda.is_available():
            peak = peak_flops(torch.cuda.get_device_name(), self._setup.perf.dtype)
        return throughput(shape, [sample.tokens for sample in samples], seconds, ranks=self._world, peak=peak)

    def digest(self) -> str:
        """See TrainEngine."""
        with self._working():
            return self._policy.digest()

    def weights(self, uri: str, step: int, kind: ExportKind = "full") -> WeightSource:
        with self._working():
            return self._policy.write(uri, step, kind)

    def export(self, uri: str, version: WeightVersion) -> WeightSource | None:
        return self.weights(uri, version.step) if self._policy.version == version else None

    def push(self, urls: Sequence[str], step: int, sync: SyncSection) -> PushReport | None:
        """See TrainEngine; None on all ranks but rank 0."""
        asked = time.monotonic()
        with self._working():
            awake = time.monotonic()
            report = self._policy.push(urls, step, sync)
        spent = {"wake_seconds": awake - asked, "seconds": time.monotonic() - asked}
        return report and replace(report, metrics=report.metrics | spent)

    def save(self, uri: str) -> CheckpointRef:
        with self._working():
            version = self._policy.current_version()
            self._policy.began_with()
            megatron_checkpoint.save_state(local_path(uri), self._state)
            layout = megatron_model_state.layout()
        return CheckpointRef(uri, version, self._state.last_key, layout)

    def restore(self, ref: CheckpointRef) -> None:
        """Go back to a checkpoint; batches applied after it count as not applied."""
        with self._working():
            reference = self._policy.began_with()
            if self._critic and self._critic.model.progress != Progress():
                self._critic = self._new_critic()  # where the checkpoint has none, nothing of the old one is to be left
            began = megatron_checkpoint.load_state(local_path(ref.uri), self._state)
            found = self._policy.restored()
        if found != ref.version.digest:
            raise megatron_checkpoint.DamagedCheckpoint(
                f"checkpoint {ref.uri} holds weights {found[:16]}, not {ref.version.digest[:16]}: it is another one"
            )
        if reference != began:
            key = "reference.path" if self._setup.reference_dir else "model.path"
            folder = self._setup.reference_dir or self._setup.model_dir
            raise ValueError(
                f"checkpoint {ref.uri} has the reference weights {began[:16]}, {folder!r} holds {reference[:16]}: "
                f"give {key} the model it was trained with"
            )
        self._policy.call(ref.version)
