"""A choice of rewards as graders are told of it: one, or a weighted sum. Importing it costs a grader nothing."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

BOXED = "boxed_"
"""What the name of a reward of the last box begins with."""
NETWORKED = ("remote", "judge")
"""The built-in rewards that ask somebody else."""


@dataclass(frozen=True)
class Part:
    """A reward, its options, and how much of its score counts."""

    name: str
    options: Mapping[str, Any]
    weight: float = 1.0


@dataclass(frozen=True)
class RewardChoice:
    """Rewards whose weighted scores are added when `summed`; else there is one, and its verdict stays as it is."""

    parts: tuple[Part, ...]
    summed: bool = False
    network: bool = False

    @property
    def name(self) -> str:
        return "+".join(part.name for part in self.parts)

    def as_json(self) -> dict[str, Any]:
        """What a grader is told."""
        return {"parts": [asdict(part) for part in self.parts], "summed": self.summed}

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> "RewardChoice":
        return RewardChoice(tuple(Part(**part) for part in content["parts"]), content["summed"])


def single(name: str, options: Mapping[str, Any], *, network: bool = False) -> RewardChoice:
    """One reward."""
    return RewardChoice((Part(name, dict(options)),), network=network or asks_others(name))


def unboxed(name: str) -> str:
    """The NAME of `boxed_NAME`; one that begins so and is a `pkg.mod:fn` is that function's."""
    return name if ":" in name else name.removeprefix(BOXED)


def asks_others(name: str) -> bool:
    """Whether a built-in reward needs the network."""
    return unboxed(name) in NETWORKED
