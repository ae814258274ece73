"""The stages of a step, named once, and which of them a run makes itself."""

from dataclasses import dataclass
from typing import Literal, get_args

Stage = Literal["sample", "generate", "score", "filter", "optimize"]
STAGES: tuple[Stage, ...] = get_args(Stage)


@dataclass(frozen=True)
class Course:
    """A run makes the stages from `first` to `last`. Those before come from another run; those after are left out."""

    first: Stage = "sample"
    last: Stage = "optimize"

    def makes(self, stage: Stage) -> bool:
        return STAGES.index(self.first) <= STAGES.index(stage) <= STAGES.index(self.last)

    @property
    def taken(self) -> tuple[Stage, ...]:
        """The stages whose tables are another run's."""
        return STAGES[: STAGES.index(self.first)]

    @property
    def trains(self) -> bool:
        return self.makes("optimize")


WHOLE = Course()
"""Every stage is made, as in a run of its own."""
