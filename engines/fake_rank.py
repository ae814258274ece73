"""A trainer rank without a model: one number per applied batch. For orchestration tests and benchmarks."""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from milepost.engines.fake_critic import FakeCritic
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
from milepost.storage import checkpoints, files
from milepost.storage.micro_batches import micro_batches, packing_rules, trained_lengths
from milepost.storage.parameters import ModelSection, SyncSection
from milepost.storage.schema import ROLLOUTS
from milepost.storage.tables import TableRef, encode, read_table, with_columns, write_table
from milepost.storage.training import PerfSection

if TYPE_CHECKING:
    from milepost.engines.train_actors import TrainSetup


class FakeRank:
    """Its weights are a chain: the digest of the weights before and of the samples that were applied.

    It cuts batches as a trainer would, balanced by tokens: it has no operations that could be counted.
    """

    def __init__(self, rank: int, world: int, setup: "TrainSetup | None") -> None:
        self._world = world
        self._packing = packing_rules(*((setup.model, setup.perf) if setup else (ModelSection(), PerfSection())))
        self._state = self._reference = hashlib.sha256(b"start").hexdigest()
        self._renewed = ""
        self._version: WeightVersion | None = None  # as exported, while the weights are still those
        self._results: dict[str, UpdateResult] = {}
        self._last: UpdateResult | None = None
        self._critic = FakeCritic(self._packing) if setup and setup.critic else None
        self.is_resting = False

    def rendezvous(self) -> tuple[str, int]:
        return "127.0.0.1", 0

    def connect(self, address: str, port: int) -> None:
        """Nothing to join."""

    def logprobs(self, batch: TableRef, role: Role, uri: str) -> TableRef:
        """The rollout's own log-probabilities, as if the fake model had sampled; zeros where there are none.

        Those of a reference that is not the policy are lower, by how much depends on which it is.
        """
        table = read_table(batch)
        column = "old_logprobs" if role == "policy" else "ref_logprobs"
        less = 0.0 if role == "policy" or self._reference == self._state else 1 + int(self._reference[0], 16)
        stored, tokens = (table[name].to_pylist() for name in ("rollout_logprobs", "response_token_ids"))
        known = [[0.0] * len(ids) if found is None else found for found, ids in zip(stored, tokens, strict=True)]
        found = [[value - less / 64 for value in row] for row in known]
        return write_table(uri, with_columns(table, {column: list(found)}), ROLLOUTS)

    def values(self, batch: TableRef, uri: str) -> TableRef:
        assert self._critic is not None
        table = read_table(batch)
        found = [[self._critic.expected] * len(ids) for ids in table["response_token_ids"].to_pylist()]
        return write_table(uri, with_columns(table, {"values": list(found)}), ROLLOUTS)

    def critic_step(self, batch: TableRef, update: UpdateParams, key: str) -> UpdateResult | None:
        return self._critic.learn(read_table(batch), key) if self._critic else None

    def step(self, batch: TableRef, update: UpdateParams, key: str) -> UpdateResult:
        if key in self._results:
            return self._results[key]
        table = read_table(batch)
        lengths, steps = trained_lengths(table), self._optimizer_steps()
        if not lengths:
            return self._record(UpdateResult(key, False, steps, {"samples": 0.0}))
        content = table.drop_columns(["run_id", "step"])  # samples teach the same in whatever run they are
        self._state = hashlib.sha256(f"{self._state}{files.digest_of(encode(content))}".encode()).hexdigest()
        self._version = None
        rows = micro_batches(lengths, self._packing)
        metrics = {"loss": 0.0, "grad_norm": 1.0, "lr": 0.0, "samples": float(len(lengths)), **rows.metrics(lengths)}
        return self._record(UpdateResult(key, True, steps + 1, metrics, rows.to_json()))

    def _record(self, result: UpdateResult) -> UpdateResult:
        self._results[result.key] = self._last = result
        return result

    def renew_reference(self, name: str) -> None:
        if self._renewed != name:
            self._reference, self._renewed = self._state, name

    def _optimizer_steps(self) -> int:
        return self._last.optimizer_step if self._last else 0

    def weights(self, uri: str, step: int, kind: ExportKind = "full") -> WeightSource:
        """A folder with the state in one file; the fake rollout engine only records the version."""
        files.publish_json(files.join(uri, "fake.json"), {"state": self._state}, overwrite=True)
        self._version = WeightVersion(step, self._state[:32])
        return WeightSource(uri, self._version)

    def export(self, uri: str, version: WeightVersion) -> WeightSource | None:
        return self.weights(uri, version.step) if self._version == version else None

    def push(self, urls: Sequence[str], step: int, sync: SyncSection) -> PushReport:
        raise ValueError(f"a fake trainer has no tensors for sync.transport={sync.transport!r}: use 'disk'")

    def digest(self) -> str:
        return self._state[:32]

    def save(self, uri: str) -> CheckpointRef:
        state = {
            "state": self._state,
            "last": asdict(self._last) if self._last else None,
            "reference": [self._reference, self._renewed],
            **({"critic": self._critic.state()} if self._critic else {}),
        }
        files.publish_json(files.join(uri, "fake.json"), state, overwrite=True)
        version = self._version or WeightVersion(self._optimizer_steps(), self._state[:32])
        taught = self._critic.last_key if self._critic else ""
        last = taught or (self._last.key if self._last else "")
        return CheckpointRef(uri, version, last, {"data_parallel": self._world})

    def release_memory(self) -> None:
        self.is_resting = True

    def resume_memory(self) -> None:
        self.is_resting = False

    def restore(self, ref: CheckpointRef) -> None:
        checkpoints.require_complete(ref.uri)
        saved = files.read_json(files.join(ref.uri, "fake.json"))
        self._state, self._version = saved["state"], ref.version
        self._reference, self._renewed = saved.get("reference", (self._reference, ""))
        self._last = UpdateResult(**saved["last"]) if saved["last"] else None
        self._results = {self._last.key: self._last} if self._last else {}
        if self._critic:
            self._critic.go_on_from(saved.get("critic", FakeCritic(self._packing).state()))
