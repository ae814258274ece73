"""How the tests of rewards ask one for its score."""

from typing import Any

from milepost.tasks.rewards import get_reward
from milepost.tasks.verdict import Sample, Verdict


def verdict(
    name: str,
    response: str,
    label: Any,
    metadata: dict[str, Any] | None = None,
    tokens: int | None = None,
    **options: Any,
) -> Verdict:
    """What a built-in reward says, in this process."""
    said: Verdict = get_reward(name)(Sample("", response, label, metadata or {}, tokens), **options)
    return said


def short(value: object) -> str:
    """A value in the name of a test: some are a megabyte."""
    return ascii(value)[:30]
