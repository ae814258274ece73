"""Evaluations are runs of their own kind: one step, in which nothing is trained, with a round for each data set."""

from dataclasses import asdict, dataclass
from typing import Any

from milepost.storage import files
from milepost.storage.runs import RunFolder, RunRecord

EVALUATION = "evaluation"  # in the data of a run's record


@dataclass(frozen=True)
class Evaluated:
    """What an evaluation is of. `run` is empty for a model folder, `version` for weights that no run has trained.

    `place` is the checkpoint or the model folder; `outbox` tells the run's lineage from that of all others.
    """

    label: str
    place: str
    run: str = ""
    version: str = ""
    outbox: str = ""

    def entry(self) -> dict[str, Any]:
        """For the data of a run's record."""
        return {EVALUATION: asdict(self)}


def evaluated(record: RunRecord) -> Evaluated | None:
    """What this run is an evaluation of; None for one that is none."""
    found = record.data.get(EVALUATION)
    return Evaluated(**found) if found else None


@dataclass(frozen=True)
class Gate:
    """What an evaluation is to be compared with, if anything, and by how much a mean may be lower than there."""

    compare: str = ""
    max_drop: float | None = None


def _gate(folder: RunFolder) -> str:
    return files.join(folder.uri, "gate.json")


def gate_of(folder: RunFolder) -> Gate:
    """What was asked of an evaluation last; nothing of one from before it was stored."""
    uri = _gate(folder)
    return Gate(**files.read_json(uri)) if files.exists(uri) else Gate()


def keep_gate(folder: RunFolder, gate: Gate) -> None:
    """For whoever goes on with the evaluation. It is no part of the record: another one may be asked for later."""
    if gate != gate_of(folder):
        files.publish_json(_gate(folder), asdict(gate), overwrite=True)
