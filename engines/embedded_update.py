"""Weights that a trainer pushes into an embedded engine: kept aside until all have arrived, then taken or dropped."""

from typing import TYPE_CHECKING, Any

from fastapi import FastAPI

if TYPE_CHECKING:  # a flow that starts engines imports this, and no torch
    from torch import Tensor

    from milepost.engines.weight_group import WeightGroup

JOIN_SECONDS = 60.0


class Update:
    """What has been received since an update began, and the groups it may be received from."""

    def __init__(self) -> None:
        self.label = ""
        self._tensors: dict[str, Tensor] | None = None
        self._groups: dict[str, WeightGroup] = {}

    @property
    def is_open(self) -> bool:
        return self._tensors is not None

    def begin(self) -> None:
        if self.is_open:
            raise ValueError("a weight update is open already: end it first")
        self._tensors, self.label = {}, ""

    def add(self, tensors: "dict[str, Tensor]") -> None:
        if self._tensors is None:
            raise ValueError("no weight update is open: begin one first")
        self._tensors |= tensors

    def end(self) -> "tuple[dict[str, Tensor], str]":
        """All tensors and their name; nothing is open any more."""
        if self._tensors is None:
            raise ValueError("no weight update is open: begin one first")
        tensors, self._tensors = self._tensors, None
        return tensors, self.label

    def drop(self) -> None:
        self._tensors = None

    def join(self, body: dict[str, Any]) -> None:
        """Join the trainer's group; ValueError when the others do not come."""
        import torch.distributed as dist

        from milepost.engines.weight_group import WeightGroup

        address, port, name, world = (
            body[key] for key in ("master_address", "master_port", "group_name", "world_size")
        )
        try:
            store = dist.TCPStore(address, port, world, is_master=False)
            self._groups[name] = WeightGroup(
                store, name, rank=body["rank_offset"], world=world, backend="gloo", seconds=JOIN_SECONDS
            )
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"the group {name!r} at {address}:{port} was not joined: {error}") from None

    def receive(self, body: dict[str, Any]) -> None:
        """Take part in the broadcast of a bucket."""
        from milepost.engines.weight_buckets import byte_count, unflatten

        group = self._groups.get(str(body.get("group_name")))
        if group is None:
            raise ValueError(f"group {body.get('group_name')!r} was not joined: call init_weights_update_group first")
        columns = zip(body["names"], body["dtypes"], body["shapes"], strict=True)
        described = [{"name": name, "dtype": dtype, "shape": shape} for name, dtype, shape in columns]
        try:
            flat = group.receive(byte_count(described))
        except RuntimeError as error:
            raise ValueError(f"the broadcast broke off: {error}") from None
        self.add(unflatten(flat, described))

    def read(self, path: str, described: list[dict[str, Any]]) -> None:
        """Take a bucket from shared memory."""
        from milepost.engines.weight_memory import read_shared

        self.add(read_shared(path, described))

    def leave(self, name: str) -> None:
        group = self._groups.pop(name, None)
        if group is None:
            raise ValueError(f"group {name!r} was not joined")
        group.close()


def add_updates(app: FastAPI, backend: Any) -> None:
    """SGLang's endpoints for weights that a trainer sends, over an EmbeddedBackend."""
    update: Update = backend.update
    done = {"success": True, "message": "done"}

    @app.get("/server_info")
    async def server_info() -> dict[str, Any]:
        return {"engine": "milepost", "weight_version": backend.label, "tp_size": 1}

    @app.post("/begin_weight_update")
    async def begin_weight_update() -> dict[str, Any]:
        update.begin()
        return done

    @app.post("/end_weight_update")
    def end_weight_update() -> dict[str, Any]:
        backend.end_update()
        return done

    @app.post("/update_weight_version")
    def update_weight_version(body: dict[str, Any]) -> dict[str, Any]:
        backend.set_label(_text(body, "new_version"))
        return done

    @app.post("/update_weights_from_tensor")
    def update_weights_from_tensor(body: dict[str, Any]) -> dict[str, Any]:
        update.read(_text(body, "shared_memory"), body.get("tensors", []))
        return done

    @app.post("/init_weights_update_group")
    def init_weights_update_group(body: dict[str, Any]) -> dict[str, Any]:
        update.join(body)
        return done

    @app.post("/update_weights_from_distributed")
    def update_weights_from_distributed(body: dict[str, Any]) -> dict[str, Any]:
        update.receive(body)
        return done

    @app.post("/destroy_weights_update_group")
    def destroy_weights_update_group(body: dict[str, Any]) -> dict[str, Any]:
        update.leave(_text(body, "group_name"))
        return done


def _text(body: dict[str, Any], key: str) -> str:
    found = body.get(key)
    if not isinstance(found, str) or not found:
        raise ValueError(f"give {key}, a string")
    return found
