"""The run whose stored stages another one goes on from, and what each table that was taken from it says of that.

It is looked for beside the run, by name; a run needs it no more once its own steps are finished.
"""

from dataclasses import asdict, dataclass
from typing import Any

from milepost.storage import runs
from milepost.storage.parameters import Parameters
from milepost.storage.runs import RunFolder, RunRecord
from milepost.storage.stages import Course, Stage

PARENT = "parent"  # in the data of a run's record
TAKEN = "taken"  # in the record of a commit


@dataclass(frozen=True)
class ParentRun:
    """Step k of a run takes its stages before `first` from step `begin` + k of `run`.

    A run that trains begins with the trainer that `run` had before `begin`, which had taken `earlier` steps in the runs
    that `run` itself goes on from.
    """

    run: str
    begin: int
    first: Stage
    earlier: int = 0

    def entry(self) -> dict[str, Any]:
        """For the data of a run's record."""
        return {PARENT: asdict(self)}


@dataclass(frozen=True)
class Taken:
    """Where the tables of a commit come from: which step of which run, and the digest of each table there.

    `manifest` is the digest of that step's manifest, `version` names the weights that generated its samples.
    """

    run: str
    step: int
    manifest: str
    version: str
    tables: dict[str, str]


def parent_run(record: RunRecord) -> ParentRun | None:
    found = record.data.get(PARENT)
    return ParentRun(**found) if found else None


def steps_before(parent: ParentRun | None) -> int:
    """Steps that the trainer of a run has taken before the first of them."""
    return parent.earlier + parent.begin if parent else 0


def trained_steps(record: RunRecord) -> int:
    """Steps that the trainer of a run has taken after the last of them."""
    return steps_before(parent_run(record)) + record.steps


def beside(folder: RunFolder, run: str) -> RunFolder:
    """The folder of another run in the same root."""
    return runs.run_folder(folder.uri.rstrip("/").rpartition("/")[0], run)


def course(parameters: Parameters, parent: ParentRun | None) -> Course:
    """Which stages a run makes."""
    return Course(parent.first if parent else "sample", "filter" if parameters.engines.train == "none" else "optimize")


def course_of(record: RunRecord) -> Course:
    """Which stages a run makes, as its record says."""
    return course(record.parameters, parent_run(record))


def taken_from(record: dict[str, Any]) -> Taken | None:
    """Where the tables of a commit with this record come from; None for one that the run made."""
    found = record.get(TAKEN)
    return Taken(**found) if found else None
