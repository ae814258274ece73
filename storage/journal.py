"""The journal of a step: one small JSON file per finished stage, published once, and the truth about what is done.

A commit stands under its slot (stage, round, shard) and carries the key of what went in. The same key again returns
what is stored; another key in the same slot is a contradiction and is refused.

A commit carries the fence of its owner's lease, and is refused when a newer claim exists. The check and the
publication are two requests: an owner that is stopped between them can still publish when it wakes up. That loses
nothing, because a slot is published once: whoever comes second gets what is stored, and the key says that it was
made of the same inputs. So readers trust a commit whatever its fence is.
"""

import time
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import pyarrow as pa

from milepost.storage import files, lease
from milepost.storage.parent import taken_from
from milepost.storage.tables import TableRef, write_table


class JournalConflict(ValueError):
    """A stage was committed before with other inputs or parameters."""


@dataclass(frozen=True)
class Slot:
    """Which part of a step: a stage of the DAG, the sampling round, and the shard where the stage has shards."""

    stage: str
    round: int = 0
    shard: int | None = None

    def __str__(self) -> str:
        shard = "" if self.shard is None else f"-s{self.shard:03d}"
        return f"{self.stage}-r{self.round}{shard}"

    @staticmethod
    def parse(text: str) -> "Slot":
        """The slot whose text this is."""
        stage, round_, *shard = text.split("-")
        return Slot(stage, int(round_[1:]), int(shard[0][1:]) if shard else None)


@dataclass(frozen=True)
class Commit:
    """What a finished stage left: its tables by name, and small JSON values. `seconds` is how long it took.

    `fence` is the number of the claim it was made under, 0 without one.
    """

    slot: str
    key: str
    tables: dict[str, TableRef]
    record: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    committed_at: float = 0.0
    fence: int = 0


@dataclass(frozen=True)
class StepStore:
    """The folder of one step: where its tables go and what it has committed.

    `fence` is the number of the claim its commits are made under; 0 is for work on a run that nobody leases.
    """

    uri: str
    run_id: str
    step: int
    fence: int = 0

    def check_fence(self) -> None:
        """LeaseLost when the run was taken over; for what a stage does outside of the journal."""
        if self.fence:
            run_uri = self.uri.rstrip("/").rsplit("/", 2)[0]
            lease.check_fence(run_uri, self.fence)

    def key(self, slot: Slot, inputs: list[TableRef], config: dict[str, Any]) -> str:
        """The identity of a stage's result: equal keys mean equal inputs, parameters, weights and seed."""
        identity = {
            "run": self.run_id,
            "step": self.step,
            "slot": str(slot),
            "inputs": [ref.digest for ref in inputs],
            "config": config,
        }
        return files.digest_of(files.canonical_json(identity).encode())

    def _commit_uri(self, slot: Slot) -> str:
        return files.join(self.uri, "journal", f"{slot}.json")

    def committed(self, slot: Slot, key: str) -> Commit | None:
        """The stored result of `slot`, or None when the stage has yet to run.

        What was taken from another run answers whatever it is asked under: it was made of that run's inputs.
        """
        uri = self._commit_uri(slot)
        if not files.exists(uri):
            return None
        commit = self._read(uri)
        if commit.key != key and taken_from(commit.record) is None:
            raise JournalConflict(
                f"{slot} of step {self.step} in run {self.run_id!r} was committed under key {commit.key[:12]}, "
                f"now its inputs or parameters give {key[:12]}: restore them or start a new run"
            )
        return commit

    def at(self, step: int) -> "StepStore":
        """The same run's store of another step."""
        return replace(self, uri=files.join(self.uri.rsplit("/", 1)[0], f"{step:06d}"), step=step)

    def stored(self, slot: Slot) -> Commit | None:
        """What `slot` committed, under whatever key."""
        uri = self._commit_uri(slot)
        return self._read(uri) if files.exists(uri) else None

    def write(self, name: str, table: pa.Table, schema: pa.Schema) -> TableRef:
        return write_table(files.join(self.uri, name), table, schema)

    def commit(
        self, slot: Slot, key: str, tables: dict[str, TableRef], *, record: dict[str, Any] | None = None, started: float
    ) -> Commit:
        """Publish the result of `slot`; `started` is `time.monotonic()` from when the stage began.

        LeaseLost, and nothing published, when another process has taken the run over.
        """
        self.check_fence()
        commit = Commit(str(slot), key, tables, record or {}, time.monotonic() - started, time.time(), self.fence)
        try:
            files.publish_json(self._commit_uri(slot), asdict(commit))
        except files.AlreadyPublished:
            stored = self.committed(slot, key)
            assert stored is not None
            return stored
        return commit

    def commits(self) -> list[Commit]:
        """Everything committed in this step, by slot."""
        folder = files.join(self.uri, "journal")
        return [self._read(files.join(folder, name)) for name in files.names(folder)]

    def _read(self, uri: str) -> Commit:
        """A commit with its tables where this step is now, wherever it was when they were written."""
        content = files.read_json(uri)
        tables = {name: TableRef(**files.moved(ref, self.uri)) for name, ref in content["tables"].items()}
        return Commit(**{**content, "tables": tables})
