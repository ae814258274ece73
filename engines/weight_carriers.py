"""How buckets travel from rank 0 of a trainer into engines: memory on one machine, or a broadcast."""

import threading
import uuid
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from milepost.engines.megatron_world import open_store, own_address
from milepost.engines.weight_buckets import Named, flatten, layout
from milepost.engines.weight_group import WeightGroup
from milepost.engines.weight_link import EngineLink, PushFailed
from milepost.engines.weight_memory import SharedBucket
from milepost.engines.weight_payload import pickled
from milepost.engines.weight_targets import IN_FLIGHT, Answers, Check, Targets

JOIN_SECONDS = 60.0
POLL_SECONDS = 0.01
UPDATE = "/update_weights_from_distributed"


class Carrier(Protocol):
    """One way. It is opened for each push, before any engine is paused, and may keep what it opened.

    `send` may return while engines still load the bucket, so that the next is gathered meanwhile; `settle` waits until
    they have loaded everything, and drops those that could not.
    """

    def open(self, targets: Targets) -> None: ...
    def send(self, targets: Targets, bucket: Sequence[Named]) -> None: ...
    def settle(self, targets: Targets) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class _Lent:
    """A bucket that engines read from the sender's memory: it lives until all have answered."""

    answers: Answers
    flat: Tensor
    shared: SharedBucket | None


class SharedMemory:
    """Engines on the trainer's machine: on a GPU they open its memory, else a copy in shared memory.

    An engine loads buckets in any order, one at a time, and reads the request for one while it loads another. Each
    costs it the opening and closing of the memory, which torch does not keep open: few large buckets are fastest.
    """

    def __init__(self) -> None:
        self._lent: deque[_Lent] = deque()

    def open(self, targets: Targets) -> None:
        """Nothing to open."""

    def send(self, targets: Targets, bucket: Sequence[Named]) -> None:
        while len(self._lent) >= IN_FLIGHT:
            self._take_back(targets)
        flat, described = flatten(bucket), layout(bucket)
        links = targets.links.values()
        text = pickled(flat, described) if any(not link.is_embedded for link in links) else ""
        shared = SharedBucket(flat, described) if any(link.is_embedded for link in links) else None

        def ask(link: EngineLink) -> None:
            served = {"serialized_named_tensors": [text] * link.ranks, "load_format": "flattened_bucket"}
            body = shared.body if shared and link.is_embedded else served | {"flush_cache": False}
            link.ask("/update_weights_from_tensor", body)

        self._lent.append(_Lent(targets.start(ask), flat, shared))

    def settle(self, targets: Targets) -> None:
        while self._lent:
            self._take_back(targets)

    def _take_back(self, targets: Targets) -> None:
        lent = self._lent.popleft()
        targets.settle(lent.answers)
        if lent.shared is not None:
            lent.shared.close()

    def close(self) -> None:
        """Nothing is kept."""


class Broadcast:
    """Engines anywhere, in one process group with rank 0 of the trainer. It is kept while the engines are the same.

    A broadcast begins when all have loaded the one before: two requests may reach an engine in another order than the
    one that rank 0 broadcasts in, and the trainer's own collectives must not meet a broadcast on its GPU.
    """

    def __init__(self) -> None:
        self._group: WeightGroup | None = None
        self._urls: list[str] = []
        self._answers: Answers = {}

    def open(self, targets: Targets) -> None:
        if self._group is not None and self._urls == list(targets.links):
            for link in targets.links.values():
                link.group = self._group.name
            return
        self._leave(targets)
        if targets.links:
            self._join(targets)

    def send(self, targets: Targets, bucket: Sequence[Named]) -> None:
        assert self._group is not None
        described = layout(bucket)
        body = {
            "names": [row["name"] for row in described],
            "dtypes": [row["dtype"] for row in described],
            "shapes": [row["shape"] for row in described],
            "group_name": self._group.name,
            "load_format": "flattened_bucket",
            "flush_cache": False,
        }
        sending = partial(self._group.send, flatten(bucket))
        self.settle(targets)
        if targets.links:
            self._answers = targets.start_together(UPDATE, lambda link: link.ask(UPDATE, body), sending)

    def settle(self, targets: Targets) -> None:
        answers, self._answers = self._answers, {}
        targets.settle_together(UPDATE, answers)
        if not targets.links:
            self.close()

    def close(self) -> None:
        group, self._group, self._urls = self._group, None, []
        if group is not None:
            group.close()

    def _leave(self, targets: Targets) -> None:
        """End a group that had other members; those that are still there are told."""
        if self._group is not None:
            name, old = self._group.name, set(self._urls)
            for url in old & targets.links.keys():
                with suppress(PushFailed):  # it may have been started again since
                    targets.links[url].ask("/destroy_weights_update_group", {"group_name": name})
        self.close()

    def _join(self, targets: Targets) -> None:
        address, offsets, world = own_address(), {}, 1
        for url, link in targets.links.items():
            offsets[url] = world
            world += link.ranks
        store = open_store(address, world)
        name = f"milepost-{uuid.uuid4().hex[:12]}"
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        seconds = min(JOIN_SECONDS, targets.seconds)
        path = "/init_weights_update_group"
        body = {"master_address": address, "master_port": store.port, "world_size": world}
        body |= {"group_name": name, "backend": backend}
        joining = _Joining(partial(WeightGroup, store, name, rank=0, world=world, backend=backend, seconds=seconds))

        def ask(link: EngineLink) -> None:
            link.group = name
            link.ask(path, body | {"rank_offset": offsets[link.url]})

        urls = list(targets.links)
        targets.settle_together(path, targets.start_together(path, ask, joining.wait))
        if targets.links:
            self._group, self._urls = joining.group, urls


class _Joining(threading.Thread):
    """A group being joined, which cannot be interrupted: when it is given up, this ends at its own deadline."""

    def __init__(self, join: Any) -> None:
        super().__init__(name="join", daemon=True)
        self._begin = join
        self.group: WeightGroup | None = None
        self._error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self.group = self._begin()
        except Exception as error:  # whatever it is, it is raised where it is waited for
            self._error = error

    def wait(self, check: Check) -> None:
        while self.is_alive():
            check()
            self.join(POLL_SECONDS)
        if self._error is not None:
            raise RuntimeError(str(self._error)) from self._error


def open_carrier(transport: str) -> Carrier:
    return Broadcast() if transport == "distributed" else SharedMemory()
