"""A trainer rank without a model: one number per applied batch. For orchestration tests and benchmarks."""

import hashlib
import json
from pathlib import Path

from milepost.engines.protocols import CheckpointRef, Role, UpdateParams, UpdateResult, WeightSource, WeightVersion
from milepost.storage import files
from milepost.storage.schema import ROLLOUTS
from milepost.storage.tables import TableRef, read_table, with_columns, write_table


class FakeRank:
    """Its weights are a chain: the digest of the weights before and of the batch that was applied."""

    def __init__(self, rank: int, world: int, setup: object) -> None:
        self._state = hashlib.sha256(b"start").hexdigest()
        self._steps = 0
        self._results: dict[str, UpdateResult] = {}
        self._last_key = ""

    def rendezvous(self) -> tuple[str, int]:
        return "127.0.0.1", 0

    def connect(self, address: str, port: int) -> None:
        """Nothing to join."""

    def logprobs(self, batch: TableRef, role: Role, uri: str) -> TableRef:
        """The rollout's own log-probabilities: the fake model is the one that sampled."""
        table = read_table(batch)
        column = "old_logprobs" if role == "policy" else "ref_logprobs"
        return write_table(uri, with_columns(table, {column: table["rollout_logprobs"].to_pylist()}), ROLLOUTS)

    def step(self, batch: TableRef, update: UpdateParams, key: str) -> UpdateResult:
        if key in self._results:
            return self._results[key]
        self._state = hashlib.sha256(f"{self._state}{batch.digest}".encode()).hexdigest()
        self._steps += 1
        self._last_key = key
        metrics = {"loss": 0.0, "grad_norm": 1.0, "lr": 0.0, "samples": float(batch.rows)}
        self._results[key] = UpdateResult(key, True, self._steps, metrics)
        return self._results[key]

    def _version(self, step: int) -> WeightVersion:
        return WeightVersion(step, self._state[:32])

    def weights(self, uri: str, step: int) -> WeightSource:
        """A folder with the state in one file; the fake rollout engine only records the version."""
        files.publish_json(files.join(uri, "fake.json"), {"state": self._state}, overwrite=True)
        return WeightSource(uri, self._version(step))

    def save(self, uri: str) -> CheckpointRef:
        state = {"state": self._state, "steps": self._steps, "last_key": self._last_key}
        files.publish_json(files.join(uri, "fake.json"), state, overwrite=True)
        return CheckpointRef(uri, self._version(self._steps), self._last_key)

    def restore(self, ref: CheckpointRef) -> None:
        saved = json.loads(Path(ref.uri, "fake.json").read_text())
        self._state, self._steps, self._last_key = saved["state"], saved["steps"], saved["last_key"]
