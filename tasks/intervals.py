"""How sure a mean is: intervals of scores, whose samples may share prompts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

Z_95 = 1.959963984540054


@dataclass(frozen=True)
class Accuracy:
    """Mean score of `count` prompts with its 95 % interval; NaN when none has a score."""

    mean: float
    low: float
    high: float
    count: int


def wilson(mean: float, count: float) -> Accuracy:
    """The interval of a mean of `count` scores in [0, 1] (Wilson 1927, JASA 22:209); [0, 1] when there are none.

    `count` is not whole when it is an effective number of scores.
    """
    if count == 0:
        return Accuracy(math.nan, 0.0, 1.0, 0)
    square = Z_95 * Z_95
    centre = (mean + square / (2 * count)) / (1 + square / count)
    half = Z_95 / (1 + square / count) * math.sqrt(mean * (1 - mean) / count + square / (4 * count * count))
    return Accuracy(mean, max(0.0, centre - half), min(1.0, centre + half), round(count))


def standard_error(groups: Sequence[Sequence[float]], mean: float) -> float:
    """Of the mean of all scores, clustered by group: sqrt(sum over groups of (sum of score - mean)^2) / scores.

    Samples of one prompt are not independent (Miller 2024, arXiv:2411.00640, section 2.2).
    """
    count = sum(len(group) for group in groups)
    return math.sqrt(sum(sum(score - mean for score in group) ** 2 for group in groups)) / count


def mean_interval(groups: Sequence[Sequence[float]]) -> Accuracy:
    """The mean of all scores and its 95 % interval; a group has the scores of one prompt, `count` is of those.

    For scores in [0, 1] it is Wilson's on the effective number of scores, mean * (1 - mean) / standard_error^2 (Korn
    and Graubard 1998, Survey Methodology 24:193), which is at least the prompts and at most the scores: with one score
    a prompt it is Wilson's as it is. For others it is mean +- 1.96 standard_error.
    """
    scored = [group for group in groups if group]
    count = sum(len(group) for group in scored)
    if not count:
        return wilson(math.nan, 0)
    mean = math.fsum(score for group in scored for score in group) / count
    error = standard_error(scored, mean)
    if any(not 0 <= score <= 1 for group in scored for score in group):
        return Accuracy(mean, mean - Z_95 * error, mean + Z_95 * error, len(scored))
    effective = mean * (1 - mean) / error**2 if error else 0.0
    found = wilson(mean, min(max(effective, len(scored)), count))
    return Accuracy(mean, found.low, found.high, len(scored))
