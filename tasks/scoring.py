"""From samples to verdicts, in the process of a grader: rewards are called here, and what they return is checked.

A reward takes a sample, or samples when its first parameter is called `samples`: then it is called once a group, with
all of the group that can be scored, and returns a list of as many; `in_batches` lifts the tie to groups.
"""

import asyncio
import functools
import hashlib
import inspect
import math
import numbers
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from milepost.tasks.reward_choice import Part, RewardChoice
from milepost.tasks.rewards import Reward, check_reward, get_reward, grader_id
from milepost.tasks.verdict import Sample, Verdict

PER_SAMPLE, PER_GROUP = 1, 0


def in_batches(size: int) -> Callable[[Reward], Reward]:
    """Says of a reward that takes `samples` that they may be of any groups, `size` of them at a time at most."""

    def marked(reward: Reward) -> Reward:
        reward.batch = size  # type: ignore[attr-defined]
        return reward

    return marked


def check(choice: Mapping[str, Any]) -> int:
    """Raise unless every reward of the choice can be used; how many samples a call may have, PER_GROUP for a group."""
    sizes = []
    for part in RewardChoice.from_json(choice).parts:
        check_reward(part.name, part.options)
        sizes.append(call_size(part.name))
    return PER_GROUP if PER_GROUP in sizes else max(sizes)


@functools.cache
def call_size(name: str) -> int:
    """How many samples a call of a reward may have: 1, PER_GROUP for all of a group, or the size of its batches."""
    reward = get_reward(name)
    first = next(iter(inspect.signature(reward).parameters), "")
    return int(getattr(reward, "batch", PER_GROUP)) if first == "samples" else PER_SAMPLE


def score(choice: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A verdict on each sample as JSON. An error of a reward that was called with all of them is raised.

    A row has the sample's `response`, and `prompt`, `label` and `metadata` as values, not as JSON text.
    """
    made = RewardChoice.from_json(choice)
    samples = [sample_of(row) for row in rows]
    started = time.monotonic()
    by_part = [_verdicts(part, samples) for part in made.parts]
    verdicts = [_sum(made, list(said)) for said in zip(*by_part, strict=True)] if made.summed else by_part[0]
    seconds, grader = (time.monotonic() - started) / max(1, len(samples)), choice_id(made)
    return [asdict(replace(verdict, grader=grader, seconds=seconds)) for verdict in verdicts]


def choice_id(choice: RewardChoice) -> str:
    """`name@hash` of the code that decides, as `grader_id` has it for one reward."""
    ids = [grader_id(part.name) for part in choice.parts]
    if not choice.summed:
        return ids[0]
    return f"{choice.name}@{hashlib.sha256(' '.join(ids).encode()).hexdigest()[:8]}"


def sample_of(row: Mapping[str, Any]) -> Sample:
    """The sample that a row tells of; what it does not tell is not known."""
    return Sample(
        row.get("prompt"),
        row["response"],
        row.get("label"),
        row.get("metadata") or {},
        row.get("response_tokens"),
        row.get("finish_reason"),
        row.get("sample_id") or "",
        row.get("group_id") or "",
    )


def _verdicts(part: Part, samples: list[Sample]) -> list[Verdict]:
    """What one reward says of each sample. Where they are many, one that it fails on costs no other its score."""
    reward = get_reward(part.name)
    if call_size(part.name) != PER_SAMPLE:
        said = _called(reward, samples, part.options)
        if not isinstance(said, Sequence) or len(said) != len(samples):
            count = f"{len(said)} verdicts" if isinstance(said, Sequence) else repr(said)
            raise ValueError(
                f"reward {part.name!r} returned {count} for {len(samples)} samples, it must return one each"
            )
        return [_verdict(part.name, one) for one in said]
    if len(samples) == 1:
        return [_verdict(part.name, _called(reward, samples[0], part.options))]
    return [_one_of_many(reward, sample, part) for sample in samples]


def _one_of_many(reward: Reward, sample: Sample, part: Part) -> Verdict:
    try:
        return _verdict(part.name, _called(reward, sample, part.options))
    except Exception as error:  # a reward's error is its verdict, of whatever type it is
        return Verdict(None, reason=f"error: {type(error).__name__}: {' '.join(str(error).split())[:500]}")


def _called(reward: Reward, given: Any, options: Mapping[str, Any]) -> Any:
    said = reward(given, **options)
    return asyncio.run(_awaited(said)) if inspect.isawaitable(said) else said


async def _awaited(said: Any) -> Any:
    return await said


def _sum(choice: RewardChoice, verdicts: list[Verdict]) -> Verdict:
    """The weighted sum. Without one of the scores there is none, because the others alone would be another reward."""
    names = part_names(choice)
    parts: dict[str, float] = {}
    for name, verdict in zip(names, verdicts, strict=True):
        parts |= {name: verdict.score} if verdict.score is not None else {}
        parts |= {f"{name}/{key}": value for key, value in verdict.parts.items()}
    reasons = [f"{name}: {verdict.reason}" for name, verdict in zip(names, verdicts, strict=True) if verdict.reason]
    extracted = next((verdict.extracted for verdict in verdicts if verdict.extracted is not None), None)
    scores = [verdict.score for verdict in verdicts]
    total = None
    if None not in scores:
        weighted = (part.weight * (value or 0.0) for part, value in zip(choice.parts, scores, strict=True))
        total = math.fsum(weighted)
    return _verdict(choice.name, Verdict(total, parts, "; ".join(reasons), extracted=extracted))


def part_names(choice: RewardChoice) -> list[str]:
    """What the parts of a sum are called in a verdict: their names, with a number from the second of a name on."""
    names = [part.name for part in choice.parts]
    counts = [names[: at + 1].count(name) for at, name in enumerate(names)]
    return [name if count == 1 else f"{name}-{count}" for name, count in zip(names, counts, strict=True)]


def _verdict(name: str, said: Any) -> Verdict:
    """What a reward returned as a verdict with a finite score."""
    verdict = said if isinstance(said, Verdict) else Verdict(_number(name, said))
    score = None if verdict.score is None else _number(name, verdict.score)
    reason = verdict.reason
    if score is not None and not math.isfinite(score):
        score, reason = None, f"not finite: {score}"
    elif score is None and not reason:
        reason = "unscorable"
    parts = {key: float(value) for key, value in verdict.parts.items() if math.isfinite(value)}
    return replace(verdict, score=score, reason=reason, parts=parts)


def _number(name: str, value: Any) -> float | None:
    scalar = value.item() if hasattr(value, "item") else value  # numpy and torch scalars
    if scalar is None:
        return None
    if not isinstance(scalar, numbers.Real):
        raise ValueError(f"reward {name!r} returned {value!r}, it must return a number, a bool, a Verdict or None")
    return float(scalar)
