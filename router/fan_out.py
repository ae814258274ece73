"""Calls that go to all engines at once, with each one's answer."""

import asyncio
import json
from typing import Any

import aiohttp

from milepost.router.backends import Backend
from milepost.router.health import describe

FAN_OUT = (
    "/pause_generation",
    "/continue_generation",
    "/abort_request",
    "/flush_cache",
    "/release_memory_occupation",
    "/resume_memory_occupation",
)


async def ask_each(
    client: aiohttp.ClientSession,
    backends: list[Backend],
    path: str,
    body: bytes,
    content_type: str,
    *,
    timeout_seconds: float,
) -> list[dict[str, Any]]:
    """POST the same to each of `backends`; what each answered, or the error, in their order."""
    asked = (_ask(client, backend, path, body, content_type, timeout_seconds) for backend in backends)
    return await asyncio.gather(*asked)


async def _ask(
    client: aiohttp.ClientSession, backend: Backend, path: str, body: bytes, content_type: str, timeout_seconds: float
) -> dict[str, Any]:
    who = {"id": backend.id, "url": backend.url}
    try:
        async with asyncio.timeout(timeout_seconds):
            async with client.post(f"{backend.url}{path}", data=body, headers={"Content-Type": content_type}) as answer:
                text = (await answer.read()).decode(errors="replace")
    except TimeoutError:
        return {**who, "error": f"no answer within {timeout_seconds:g} s"}
    except aiohttp.ClientError as error:
        return {**who, "error": describe(error)}
    return {**who, "status": answer.status, "answer": _json_or_text(text)}


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
