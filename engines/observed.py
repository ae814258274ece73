"""What every actor of a run can be asked about itself, and where it writes what it logs."""

import faulthandler
import logging

from milepost.engines import cluster
from milepost.storage.process_logs import log_handler

import ray  # isort: skip  (after cluster, which sets how it authenticates)


class Observed:
    """Of an actor that `cluster.start_actor` starts."""

    @ray.method(concurrency_group=cluster.CONTROL)  # type: ignore[untyped-decorator]
    def stack(self) -> str:
        """What every thread is doing now, for one that takes too long."""
        return cluster.stacks_here()

    def log_to(self, path: str) -> None:
        """Append what this process logs to `path`, and its stacks when native code crashes."""
        logging.getLogger().addHandler(log_handler(path))
        logging.getLogger("milepost").setLevel(logging.INFO)
        faulthandler.enable(open(path, "a"))
