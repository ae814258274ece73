"""A process group of a trainer and the engines it broadcasts weights to, apart from the trainer's own groups.

It is laid out as SGLang's `init_custom_process_group` does, so that its servers can be in it.
"""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

POLL_SECONDS = 0.001


class WeightGroup:
    """A member of a group, from its joining to its closing."""

    def __init__(self, store: dist.Store, name: str, *, rank: int, world: int, backend: str, seconds: float) -> None:
        """Join; RuntimeError when the others have not come within `seconds`, which also bounds each broadcast."""
        self.name = name
        # The same nesting of stores and the same helper as SGLang: members find each other by these names.
        self._group, _ = c10d._new_process_group_helper(
            world,
            rank,
            [],
            dist.Backend(backend),
            dist.PrefixStore(name, store),
            group_name=name,
            timeout=timedelta(seconds=seconds),
        )
        c10d._world.pg_group_ranks[self._group] = {index: index for index in range(world)}

    def send(self, flat: Tensor, check: Callable[[], None]) -> None:
        """Broadcast from rank 0. `check` is asked meanwhile and raises when there is no use in waiting."""
        work = dist.broadcast(flat, src=0, group=self._group, async_op=True)
        while not work.is_completed():
            check()
            time.sleep(POLL_SECONDS)
        work.wait()

    def receive(self, size: int) -> Tensor:
        """`size` bytes that rank 0 broadcasts."""
        flat = torch.empty(size, dtype=torch.uint8)
        dist.broadcast(flat, src=0, group=self._group)
        return flat

    def close(self) -> None:
        """Leave; others that wait for this member get an error."""
        group: Any = self._group
        if dist.get_backend(group) == "nccl":
            group.abort()  # destroying waits for a broadcast that another member never joins
        dist.destroy_process_group(group)
