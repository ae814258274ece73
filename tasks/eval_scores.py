"""What an evaluation says of a data set: mean score, pass@k, majority vote, lengths. Everything here is pure."""

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from milepost.storage.eval_sets import passes
from milepost.storage.parameters import EvalSet
from milepost.tasks.intervals import mean_interval


@dataclass(frozen=True)
class Item:
    """One prompt with the scores of its samples, None where a sample has none, and the answers that they gave."""

    prompt_id: str
    group_id: str
    scores: list[float | None]
    answers: list[str]

    @property
    def known(self) -> list[float]:
        return [score for score in self.scores if score is not None]

    def right(self, threshold: float) -> int:
        """Samples that count as right; one without a score does not."""
        return sum(score >= threshold for score in self.known)


@dataclass(frozen=True)
class SetScore:
    """A data set as it was scored. `mean` is over the samples that have a score, with its 95 % interval.

    `count` is the number of prompts that have one. `pass_at` has pass@k by k as text; `majority` is the share of
    prompts whose commonest answer is right, None with one sample a prompt. `unscorable` samples are wrong in both.
    """

    name: str
    mean: float | None
    low: float
    high: float
    count: int
    prompts: int
    samples: int
    unscorable: int
    truncated: float
    length_mean: float
    length_max: int
    n_samples_per_prompt: int
    threshold: float
    pass_at: dict[str, float]
    majority: float | None

    def metrics(self) -> dict[str, float]:
        """Every number by its name, as in eval/SET/mean."""
        values = {
            name: value
            for name, value in asdict(self).items()
            if name not in ("name", "pass_at", "majority", "threshold", "n_samples_per_prompt") and value is not None
        }
        values |= {f"pass_at_{k}": value for k, value in self.pass_at.items()}
        values |= {} if self.majority is None else {"majority": self.majority}
        return {f"eval/{self.name}/{name}": float(value) for name, value in values.items()}


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that one of k samples is right when c of n are: 1 - C(n-c, k) / C(n, k).

    Unbiased, and a product of ratios so that nothing overflows (Chen et al. 2021, arXiv:2107.03374).
    """
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(f"pass@{k} cannot be told from {n} samples of which {c} are right: k is 1 to {n}")
    if n - c < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


def vote(answers: Sequence[str]) -> int:
    """The first place of the commonest answer; of those that are equally common, the one that came first."""
    counts = Counter(answers)
    winner = max(counts, key=lambda answer: counts[answer])  # in order of appearance, so the first of a tie
    return answers.index(winner)


def majority(items: Sequence[Item], threshold: float) -> float:
    """The share of items whose commonest answer has a score from `threshold` on."""
    voted = [item.scores[vote(item.answers)] for item in items]
    return sum(score is not None and score >= threshold for score in voted) / len(items)


def items(table: pa.Table) -> list[Item]:
    """The prompts of a scored table, in their order. An answer is what the reward extracted, else the response."""
    found: dict[str, Item] = {}
    for row in table.select(["group_id", "prompt_id", "reward", "verdict", "response"]).to_pylist():
        item = found.setdefault(row["group_id"], Item(row["prompt_id"], row["group_id"], [], []))
        item.scores.append(row["reward"])
        item.answers.append(_answer(row))
    return list(found.values())


def _answer(row: dict[str, Any]) -> str:
    extracted = json.loads(row["verdict"] or "{}").get("extracted")
    return str(row["response"] if extracted is None else extracted)


def set_score(table: pa.Table, eval_set: EvalSet) -> SetScore:
    """All there is to say of a scored table of one data set."""
    found, threshold = items(table), eval_set.threshold
    lengths = pc.list_value_length(table["response_token_ids"])
    mean = mean_interval([item.known for item in found])
    rates = {
        k: math.fsum(pass_at_k(len(item.scores), item.right(threshold), k) for item in found) / len(found)
        for k in passes(eval_set)
    }
    return SetScore(
        name=eval_set.name,
        mean=None if math.isnan(mean.mean) else mean.mean,
        low=mean.low,
        high=mean.high,
        count=mean.count,
        prompts=len(found),
        samples=table.num_rows,
        unscorable=table["reward"].null_count,
        truncated=pc.sum(pc.equal(table["status"], "truncated")).as_py() / table.num_rows,
        length_mean=float(pc.mean(lengths).as_py()),
        length_max=int(pc.max(lengths).as_py()),
        n_samples_per_prompt=eval_set.n_samples_per_prompt,
        threshold=threshold,
        pass_at={str(k): rate for k, rate in rates.items()},
        majority=majority(found, threshold) if eval_set.n_samples_per_prompt > 1 else None,
    )
