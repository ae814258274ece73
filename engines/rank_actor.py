"""The Ray actor around one trainer rank. The rank's class is named, so that only the actor's process imports it."""

import logging
import time
from typing import Any

from milepost.engines import cluster
from milepost.engines.observed import Observed
from milepost.storage.registry import load_dotted

import ray  # isort: skip  (after cluster, which sets how it authenticates)


NOTED = {"connect": "loaded its model", "restore": "restored a checkpoint", "save": "saved a checkpoint"}
_log = logging.getLogger(__name__)


class RankActor(Observed):
    """`call` is answered by the rank, one at a time; `stack` is answered at any time."""

    def __init__(self, rank_class: str, *args: Any) -> None:
        self._rank = load_dotted(rank_class, group="rank class")(*args)

    def call(self, method: str, *args: Any) -> Any:
        begun = time.monotonic()
        try:
            answer = getattr(self._rank, method)(*args)
        except Exception:
            _log.exception("%s failed", method)
            raise
        if method in NOTED:
            _log.info("%s in %.1f s", NOTED[method], time.monotonic() - begun)
        return answer

    @ray.method(concurrency_group=cluster.CONTROL)  # type: ignore[untyped-decorator]
    def is_resting(self) -> bool:
        """Whether the rank has given its memory up, also while it works."""
        resting: bool = self._rank.is_resting
        return resting
