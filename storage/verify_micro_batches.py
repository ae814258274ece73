"""The micro-batches that a batch was trained in, against its rows, their budget, and what is worked out here anew."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from milepost.storage.micro_batches import MicroBatches, PackingRules, micro_batches, trained_lengths
from milepost.storage.verify_tables import WRITTEN_SO, Fault, Stack


def check_micro_batches(record: Mapping[str, Any], batches: Stack, rules: PackingRules, commit_uri: str) -> list[Fault]:
    """Of every result that says how its batch was cut; those of before it was stored do not. `rules` are the run's.

    A critic's are the policy's, which are looked at, unless it was trained alone.
    """
    results, taught = record.get("results", []), record.get("critic", {}).get("results", [])
    problems = [
        f"micro-batches of batch {index} are others for the critic than for the policy"
        for index, (own, other) in enumerate(zip(results, taught, strict=False))
        if own["micro_batches"] != other["micro_batches"]
    ]
    for index, (result, (_, batch)) in enumerate(zip(results or taught, batches.each(), strict=False)):
        if result.get("micro_batches") is not None:
            found = _problems(result, trained_lengths(batch), rules)
            problems += [f"micro-batches of batch {index} {problem}" for problem in found]
    return [Fault(commit_uri, problem, WRITTEN_SO) for problem in problems]


def _problems(result: Mapping[str, Any], lengths: Mapping[int, int], rules: PackingRules) -> list[str]:
    """What is wrong, and then nothing that would follow from it."""
    try:
        cut = MicroBatches.parse(result["micro_batches"])
    except (KeyError, TypeError, ValueError) as error:
        return [f"cannot be read: {error}"]
    found = _wrong_rows(cut, lengths)
    if found:
        return found
    found = [f"hold {used} tokens, {cut.rules.max_tokens} is the budget" for used in _over_budget(cut, lengths)]
    if cut.rules != rules:
        found.append(f"keep to {vars(cut.rules)}, the parameters give {vars(rules)}")
    if found:
        return found
    if cut != micro_batches(lengths, rules, cut.cost):
        return ["are not those that the lengths of its samples give"]
    return [
        f"give {name} {value:g}, {result['metrics'].get(name)} is stored"
        for name, value in cut.metrics(lengths).items()
        if result["metrics"].get(name) != value
    ]


def _wrong_rows(cut: MicroBatches, lengths: Mapping[int, int]) -> list[str]:
    counts = Counter(row for rank in cut.rows for rows in rank for row in rows)
    lost = [f"lack row {row}" for row in lengths if row not in counts]
    twice = [f"have row {row} {count} times" for row, count in counts.items() if count > 1]
    return lost + twice + [f"have row {row}, which has no token to train" for row in counts if row not in lengths]


def _over_budget(cut: MicroBatches, lengths: Mapping[int, int]) -> list[int]:
    """Tokens of each micro-batch that has more than it may and more than one sample; padded ones count as computed."""
    held = [[lengths[row] for row in rows] for rank in cut.rows for rows in rank if len(rows) > 1]
    used = [sum(tokens) if cut.rules.packing else len(tokens) * max(tokens) for tokens in held]
    return [tokens for tokens in used if tokens > cut.rules.max_tokens]
