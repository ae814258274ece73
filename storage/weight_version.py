"""The name of weights: how often they were trained, and the digest of their content."""

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class WeightVersion:
    """Weights after `step` trained steps (0: as loaded), and the digest of their content (see engines/digest.py)."""

    step: int
    digest: str

    def __str__(self) -> str:
        return f"{self.step}-{self.digest[:16]}"

    @staticmethod
    def parse(text: str) -> "WeightVersion":
        """The version an engine stamped on a sample; its digest has 16 digits."""
        step, _, digest = text.partition("-")
        if not step.isdigit() or not digest:
            raise ValueError(f"{text!r} is not a weight version, expected 'STEP-DIGEST'")
        return WeightVersion(int(step), digest)
