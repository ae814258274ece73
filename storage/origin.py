"""What a run that was imported says of where it comes from; a run that was made here has none."""

from dataclasses import asdict, dataclass, field
from typing import Any

from milepost.storage.runs import RunRecord

ORIGIN = "origin"  # in the data of a run's record
IMPORTED = "imported"  # in the place of a reward's name: whatever scored the file


def require_own_reward(run: str, name: str, instead: str) -> None:
    """ValueError for the reward of a run whose samples were scored elsewhere; `instead` is what can be done."""
    if name == IMPORTED:
        raise ValueError(f"the samples of run {run!r} were scored elsewhere, before they were imported: {instead}")


@dataclass
class Origin:
    """The file that a run was read from, and what it left open.

    `lacking` counts rows by what they did not say, which is null in the tables. `tokenized` counts the responses whose
    token ids were made on the way, `mismatches` those whose tokens are not their text, `ignored` names unknown keys.
    """

    file: str
    digest: str
    rows: int
    ignored: list[str] = field(default_factory=list)
    lacking: dict[str, int] = field(default_factory=dict)
    tokenized: int = 0
    mismatches: int = 0

    def entry(self) -> dict[str, Any]:
        """For the data of a run's record."""
        return {ORIGIN: asdict(self)}


def origin_of(record: RunRecord) -> Origin | None:
    found = record.data.get(ORIGIN)
    return Origin(**found) if found else None
