"""How buckets travel from rank 0 of a trainer into engines: memory on one machine, or a broadcast."""

import base64
import io
import threading
import uuid
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any, Protocol

import torch
import torch.multiprocessing  # teaches ForkingPickler tensors

from milepost.engines.megatron_world import open_store, own_address
from milepost.engines.weight_buckets import Named, flatten, layout
from milepost.engines.weight_group import WeightGroup
from milepost.engines.weight_link import EngineLink, PushFailed
from milepost.engines.weight_memory import SharedBucket
from milepost.engines.weight_targets import Check, Targets

JOIN_SECONDS = 60.0
POLL_SECONDS = 0.01


class Carrier(Protocol):
    """One way. It is opened for each push, before any engine is paused, and may keep what it opened."""

    def open(self, targets: Targets) -> None: ...
    def send(self, targets: Targets, bucket: Sequence[Named]) -> None: ...
    def close(self) -> None: ...


class SharedMemory:
    """Engines on the trainer's machine: on a GPU they open its memory, else a copy in shared memory."""

    def open(self, targets: Targets) -> None:
        """Nothing to open."""

    def send(self, targets: Targets, bucket: Sequence[Named]) -> None:
        if any(link.is_embedded for link in targets.links.values()):
            shared = SharedBucket(bucket)
            try:
                self._ask(targets, shared.body, embedded=True)
            finally:
                shared.close()
        if any(not link.is_embedded for link in targets.links.values()):
            payload, load_format = _payload(bucket)
            text, kept = _pickled(payload)
            body = {"serialized_named_tensors": [text], "load_format": load_format, "flush_cache": False}
            self._ask(targets, body, embedded=False)
            del kept  # the engines open the sender's memory: it lives until all have answered

    def _ask(self, targets: Targets, body: dict[str, Any], *, embedded: bool) -> None:
        def ask(link: EngineLink) -> None:
            if link.is_embedded == embedded:
                ranks = {} if embedded else {"serialized_named_tensors": body["serialized_named_tensors"] * link.ranks}
                link.ask("/update_weights_from_tensor", body | ranks)

        targets.each(ask)

    def close(self) -> None:
        """Nothing is kept."""


def _payload(bucket: Sequence[Named]) -> tuple[object, str | None]:
    """What SGLang unpickles, and the format it knows it by."""
    if not bucket[0][1].is_cuda:
        return [(name, tensor.detach().clone()) for name, tensor in bucket], None  # sharing moves a tensor
    from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    monkey_patch_torch_reductions()  # SGLang's own: devices are named by what they are, not by their number
    flat = FlattenedTensorBucket(named_tensors=list(bucket))
    return {"flattened_tensor": flat.get_flattened_tensor(), "metadata": flat.get_metadata()}, "flattened_bucket"


def _pickled(payload: object) -> tuple[str, object]:
    """What SGLang's MultiprocessingSerializer makes of `payload`, and what has to live until it is opened.

    Memory is shared by name: a descriptor cannot be handed over HTTP, and SGLang dies of one that it cannot open.
    """
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        buffer = io.BytesIO()
        ForkingPickler(buffer).dump(payload)
    finally:
        torch.multiprocessing.set_sharing_strategy(before)
    return base64.b64encode(buffer.getvalue()).decode(), payload


class Broadcast:
    """Engines anywhere, in one process group with rank 0 of the trainer. It is kept while the engines are the same."""

    def __init__(self) -> None:
        self._group: WeightGroup | None = None
        self._urls: list[str] = []

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
        path = "/update_weights_from_distributed"
        targets.together(path, lambda link: link.ask(path, body), sending)
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
        targets.together(path, ask, joining.wait)
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
