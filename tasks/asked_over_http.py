"""Asking somebody over HTTP about a response: a deadline, retries where another try may help, and a bound on how many.

Only a connection that failed and a status of 500 or more are tried again, after a pause that doubles and is drawn so
that those who wait do not come in step; whatever else is wrong stays wrong.
"""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp

from milepost.storage.redaction import masked_text

FIRST_DELAY_SECONDS = 0.2
LONGEST_DELAY_SECONDS = 10.0
MAX_ANSWER_BYTES = 16 * 1024**2
SHOWN = 300

Item = TypeVar("Item")


class Unanswered(Exception):
    """Why nobody gave an answer: `timeout`, `unreachable: ...`, `refused: ...` or `unparsable: ...`."""


@dataclass(frozen=True)
class Asker:
    """`deadline_seconds` bounds a question with all its retries; the caller owns `client`."""

    client: aiohttp.ClientSession
    deadline_seconds: float
    retries: int

    async def post(self, url: str, body: Any) -> Any:
        """What was answered, of JSON; Unanswered says why nothing was."""
        try:
            async with asyncio.timeout(self.deadline_seconds):
                return await self._persistently(url, body)
        except TimeoutError:
            raise Unanswered("timeout") from None

    async def _persistently(self, url: str, body: Any) -> Any:
        for attempt in range(self.retries + 1):
            try:
                async with self.client.post(url, json=body) as response:
                    text = await _read(response)
                    if response.status < 400:
                        return _parsed(text)
                    problem = f"{response.status} {text[:SHOWN].decode(errors='replace').strip()}".strip()
                    if response.status < 500:
                        raise Unanswered(f"refused: {problem}")
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
                problem = f"{type(error).__name__}: {error}".rstrip(": ")
            except (aiohttp.ClientError, ValueError) as error:  # an address that is none
                raise Unanswered(f"refused: {type(error).__name__}: {error}") from None
            if attempt < self.retries:
                await asyncio.sleep(_delay(attempt))
        raise Unanswered(f"unreachable: {masked_text(problem)} after {self.retries + 1} attempts")


async def ask_each(
    items: Sequence[Item],
    ask: Callable[[Asker, Item], Awaitable[Any]],
    *,
    api_key: str,
    deadline_seconds: float,
    retries: int,
    concurrency: int,
) -> list[Any]:
    """What `ask` makes of each, in order, with at most `concurrency` at a time."""
    gate = asyncio.Semaphore(concurrency)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else None
    connector = aiohttp.TCPConnector(limit=concurrency)
    async with aiohttp.ClientSession(connector=connector, headers=headers, timeout=aiohttp.ClientTimeout()) as client:
        asker = Asker(client, deadline_seconds, retries)

        async def one(item: Item) -> Any:
            async with gate:
                return await ask(asker, item)

        return await asyncio.gather(*map(one, items))


def _delay(attempt: int) -> float:
    longest = min(FIRST_DELAY_SECONDS * 2**attempt, LONGEST_DELAY_SECONDS)
    return random.uniform(longest / 2, longest)


async def _read(response: aiohttp.ClientResponse) -> bytes:
    text = bytearray()
    async for block in response.content.iter_chunked(2**16):
        text += block
        if len(text) > MAX_ANSWER_BYTES:
            raise Unanswered(f"unparsable: more than {MAX_ANSWER_BYTES} bytes")
    return bytes(text)


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise Unanswered(f"unparsable: {text[:SHOWN].decode(errors='replace')!r} is not JSON") from None
