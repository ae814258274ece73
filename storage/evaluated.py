"""Evaluations are runs of their own kind: one step, in which nothing is trained, with a round for each data set."""

from dataclasses import asdict, dataclass
from typing import Any

from milepost.storage.runs import RunRecord

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
