"""In which Ray cluster a flow has its engines."""

from collections.abc import Iterator
from contextlib import contextmanager

from milepost.engines.fleet import is_joined, joined_cluster
from milepost.flows.progress import say
from milepost.flows.services import running


@contextmanager
def joined_ray() -> Iterator[None]:
    """In the Ray cluster of `up`, or one of this run's own."""
    address = running().ray_address
    if address is None and not is_joined():
        say("no Ray head runs, so this run starts its own")
    with joined_cluster(address):
        yield
