"""What a run tells its router: which weights are current, and which engines there are."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp

from milepost.engines.protocols import WeightVersion
from milepost.router.backends import State
from milepost.router.client import Reply, open_client, sentence

TIMEOUT_SECONDS = 60.0

Method = Literal["GET", "POST", "DELETE"]


@dataclass(frozen=True)
class Worker:
    """An engine as the router sees it."""

    id: str
    url: str
    state: State


@dataclass(frozen=True)
class Rotation:
    """What the router sends requests to: engines in state `healthy`, which hold `version` unless that is None."""

    version: WeightVersion | None
    workers: list[Worker]

    @property
    def serving(self) -> list[str]:
        return [worker.url for worker in self.workers if worker.state == "healthy"]


async def set_weight_version(url: str, version: WeightVersion | None, *, token: str | None = None) -> Rotation:
    """Tell the router at `url` which weights are current; ConnectionError when it does not answer or refuses."""
    body = {"weight_version": None if version is None else str(version)}
    return _rotation(await _ask("POST", f"{url}/weight_version", body, token=token))


async def rotation(url: str, *, token: str | None = None) -> Rotation:
    return _rotation(await _ask("GET", f"{url}/workers", token=token))


async def add_worker(url: str, engine_url: str, *, token: str | None = None) -> Worker:
    """Let the router probe the engine at `engine_url` and, if it is well and its weights are current, use it."""
    return _worker(await _ask("POST", f"{url}/workers", {"url": engine_url}, token=token))


async def remove_worker(url: str, worker: Worker, *, token: str | None = None) -> None:
    """Take out an engine that is gone: there is nothing to wait for."""
    await _ask("DELETE", f"{url}/workers/{worker.id}?drain_seconds=0", token=token)


def _rotation(answer: Mapping[str, Any]) -> Rotation:
    named = answer["weight_version"]
    version = None if named is None else WeightVersion.parse(named)
    return Rotation(version, [_worker(found) for found in answer["workers"]])


def _worker(found: Mapping[str, Any]) -> Worker:
    return Worker(found["id"], found["url"], found["state"])


async def _ask(method: Method, url: str, body: Any = None, *, token: str | None) -> Any:
    try:
        async with open_client(1, token=token) as client:
            timeout = aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)
            async with client.request(method, url, json=body, timeout=timeout) as response:
                reply = Reply(response.status, response.reason or "", await response.read())
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ConnectionError(f"the router at {url} did not answer: {type(error).__name__}: {error}") from None
    if reply.status >= 400:
        raise ConnectionError(f"the router refused {method} {url}: {sentence(reply)}")
    return json.loads(reply.body)
