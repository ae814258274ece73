"""What a step does with a critic: what it is taught by, what came of it, and how well it foretold the returns."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import pyarrow as pa

from milepost.engines.protocols import UpdateParams, UpdateResult
from milepost.storage.journal import Commit
from milepost.tasks.off_policy import flat, is_trained

RECORD = "critic"  # in the record of a commit

# Metrics that only a critic has, and those of the batch, which are the policy's too.
_AS_THEY_ARE = {
    *("value_loss", "value_clipfrac"),
    *("samples", "tokens", "micro_batches", "packing_efficiency", "imbalance"),
}


@dataclass(frozen=True)
class Critique:
    """The critic's part of a step: the loss of every batch, the result of each, and what is measured of the values."""

    update: UpdateParams
    results: list[UpdateResult]
    metrics: dict[str, float] = field(default_factory=dict)


def stored_critique(commit: Commit) -> Critique | None:
    """That of a committed optimize stage; None of a run without a critic."""
    found: dict[str, Any] | None = commit.record.get(RECORD)
    if found is None:
        return None
    results = [UpdateResult(**result) for result in found["results"]]
    return Critique(UpdateParams(**found["update"]), results, found["metrics"])


def as_recorded(critique: Critique | None) -> dict[str, Any]:
    """For the record of a commit."""
    return {RECORD: asdict(critique)} if critique else {}


def critic_metrics(table: pa.Table) -> dict[str, float]:
    """Of a step's samples, with values and returns: their means over trained tokens, and how much is foretold.

    `explained_variance` is 1 where values are the returns, 0 where they could as well be one number, and absent where
    the returns do not differ.
    """
    trained = is_trained(table)
    values, returns = (flat(table, name)[trained] for name in ("values", "returns"))
    if not len(values):
        return {}
    found = {"rollout/values": float(values.mean()), "rollout/returns": float(returns.mean())}
    spread = float(returns.var())
    return found | ({"train/explained_variance": 1 - float((returns - values).var()) / spread} if spread else {})


def named_metrics(results: Sequence[UpdateResult]) -> list[dict[str, float]]:
    """The numbers of a critic's results, under names of their own where the policy has others of that name."""
    return [
        {name if name in _AS_THEY_ARE else f"critic-{name}": value for name, value in result.metrics.items()}
        for result in results
    ]
