"""The processes that make the calls of a model, apart from a run's graders: a slow tool delays no verdict."""

from milepost.engines.graders import GraderPool
from milepost.storage.parameters import RolloutSection


def _pool(run: str) -> str:
    return f"{run}/tools"


def start_tools(run: str, rollout: RolloutSection) -> GraderPool:
    """Start the tool processes of `run`; the caller closes them."""
    return GraderPool.start(_pool(run), workers=rollout.tool_workers)


def connect_tools(run: str, *, workers: int) -> list[GraderPool]:
    """The tool processes of `run`, each as a pool of its own: a pool gives a single call to its first, busy or not."""
    pool = GraderPool.connect(_pool(run), workers=workers)
    return [GraderPool(pool.run, (actor,)) for actor in pool.actors]
