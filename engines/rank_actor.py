"""The Ray actor around one trainer rank. The rank's class is named, so that only the actor's process imports it."""

from typing import Any

from milepost.engines import cluster
from milepost.storage.registry import load_dotted

import ray  # isort: skip  (after cluster, which sets how it authenticates)


class RankActor:
    """`call` is answered by the rank, one at a time; `stack` is answered at any time."""

    def __init__(self, rank_class: str, *args: Any) -> None:
        self._rank = load_dotted(rank_class, group="rank class")(*args)

    def call(self, method: str, *args: Any) -> Any:
        return getattr(self._rank, method)(*args)

    @ray.method(concurrency_group=cluster.CONTROL)  # type: ignore[untyped-decorator]
    def is_resting(self) -> bool:
        """Whether the rank has given its memory up, also while it works."""
        resting: bool = self._rank.is_resting
        return resting

    @ray.method(concurrency_group=cluster.CONTROL)  # type: ignore[untyped-decorator]
    def stack(self) -> str:
        """What every thread is doing now, for a rank that takes too long."""
        return cluster.stacks_here()
