"""Rewards of reasoning-gym's tasks: each answer is judged by the verifier of the task that asked."""

import functools
import re
from typing import Any

from milepost.storage.registry import nearest
from milepost.tasks.extraction import after_thinking
from milepost.tasks.verdict import Sample, Verdict

try:
    from reasoning_gym.factory import DATASETS, get_score_answer_fn
except ImportError as error:
    raise ImportError("the reward 'reasoning_gym' needs reasoning-gym: pip install 'milepost[envs]'") from error

# What verifiers raise on an answer in another form than theirs.
_UNREADABLE = (ArithmeticError, AttributeError, LookupError, RecursionError, SyntaxError, TypeError, ValueError)
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)


def reasoning_gym(sample: Sample) -> Verdict:
    """The task's own score, between 0 and 1.

    The sample's metadata (or its label, when that is an object) is the entry as the task made it, or holds it as
    `entry`; the task's name is `dataset`, or `source_dataset` in the entry. The answer is the last `<answer>` element
    after the thinking, else the last line that is not blank; one that the verifier raises on is wrong.
    """
    entry = _entry(sample)
    name = str(sample.metadata.get("dataset") or entry["metadata"].get("source_dataset"))
    answer = extract(sample.response)
    if answer is None:
        return Verdict(0.0, reason="no answer")
    scorer = _scorer(name)
    try:
        score = float(scorer(answer, entry))
    except _UNREADABLE as error:
        return Verdict(0.0, reason=f"unreadable: {type(error).__name__}: {error}"[:200], extracted=answer)
    return Verdict(score, extracted=answer)


def extract(response: str) -> str | None:
    """The answer in a response, or None when it is blank."""
    text = after_thinking(response)
    tagged = _TAGGED.findall(text)
    if tagged:
        return str(tagged[-1]).strip()
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else None


def _entry(sample: Sample) -> dict[str, Any]:
    for place in (sample.metadata.get("entry"), sample.metadata, sample.label):
        if isinstance(place, dict) and "answer" in place and isinstance(place.get("metadata"), dict):
            return place
    raise ValueError("no reasoning-gym entry (question, answer, metadata) in the metadata or label: add it as 'entry'")


@functools.cache
def _scorer(name: str) -> Any:
    if name not in DATASETS:
        raise LookupError(f"unknown reasoning-gym task {name!r}{nearest(name, list(DATASETS))}")
    return get_score_answer_fn(name)
