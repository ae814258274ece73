"""Probing backends: all at once, each with a deadline, so that a hanging one delays no other."""

import asyncio
import logging
from typing import Any

import aiohttp

from milepost.router.backends import Backend, BackendPool

log = logging.getLogger(__name__)

INFO_PATH = "/get_model_info"  # SGLang reports the weight version here


async def probe(pool: BackendPool, client: aiohttp.ClientSession, backend: Backend, timeout_seconds: float) -> None:
    """Ask `backend` whether it is well and which weights it holds, and tell the pool."""
    before = backend.state
    try:
        async with asyncio.timeout(timeout_seconds):
            async with client.get(f"{backend.url}/health") as answer:
                answer.raise_for_status()
            version = await _weight_version(client, backend)
    except TimeoutError:
        pool.failed(backend, f"no answer to a health probe within {timeout_seconds:g} s", at_once=False)
    except aiohttp.ClientConnectionError as error:
        pool.failed(backend, describe(error), at_once=True)
    except (aiohttp.ClientError, ValueError) as error:
        pool.failed(backend, describe(error), at_once=False)
    else:
        pool.answered(backend, version)
    if backend.state != before:
        level = logging.DEBUG if {before, backend.state} == {"stale", "healthy"} else logging.INFO  # new weights
        log.log(
            level, "worker %s went from %s to %s (%s)", backend.url, before, backend.state, backend.last_error or "well"
        )


async def _weight_version(client: aiohttp.ClientSession, backend: Backend) -> str | None:
    """The version a backend says it holds; None when it does not say."""
    async with client.get(f"{backend.url}{INFO_PATH}") as answer:
        if answer.status != 200:
            return None
        info: Any = await answer.json(content_type=None)
    version = info.get("weight_version") if isinstance(info, dict) else None
    return None if version is None else str(version)


async def probe_all(pool: BackendPool, client: aiohttp.ClientSession, timeout_seconds: float) -> None:
    await asyncio.gather(*(probe(pool, client, backend, timeout_seconds) for backend in pool.all()))


async def keep_probing(
    pool: BackendPool, client: aiohttp.ClientSession, *, every_seconds: float, timeout_seconds: float
) -> None:
    """Probe until cancelled."""
    while True:
        await asyncio.sleep(every_seconds)
        await probe_all(pool, client, timeout_seconds)


def describe(error: Exception) -> str:
    """An error as one line that is never empty."""
    return f"{type(error).__name__}: {error}".rstrip(": ")
