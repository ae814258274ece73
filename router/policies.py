"""How the router chooses among backends. A policy sees candidates that may all serve, and knows nothing of HTTP."""

from collections.abc import Sequence

from milepost.router.backends import Backend, Policy
from milepost.storage.registry import resolve


def least_loaded(candidates: Sequence[Backend]) -> Backend:
    """Fewest requests in flight; among equals the one that was picked longest ago."""
    return min(candidates, key=lambda backend: (backend.in_flight, backend.picked))


def round_robin(candidates: Sequence[Backend]) -> Backend:
    """The one that was picked longest ago."""
    return min(candidates, key=lambda backend: backend.picked)


POLICIES: dict[str, Policy] = {"least_loaded": least_loaded, "round_robin": round_robin}


def get_policy(name: str) -> Policy:
    policy: Policy = resolve(name, POLICIES, group="milepost.policies")
    return policy
