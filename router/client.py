"""Asking over HTTP for one completion from an engine or a router that speaks SGLang's `/generate`."""

import asyncio
import contextlib
import json
import random
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from milepost.engines.protocols import Completion, GenerateRequest
from milepost.router.completions import parse_completion
from milepost.router.engine_work import EngineWork

FIRST_DELAY_SECONDS = 0.2
LONGEST_DELAY_SECONDS = 5.0
ABORT_TIMEOUT_SECONDS = 5.0
UNAVAILABLE = 503
ROUTING_KEY = "X-SMG-Routing-Key"


class GenerationFailed(ConnectionError):
    """No attempt inside the deadline gave an answer; asking again later may."""


class RequestRefused(ValueError):
    """The engine called the request wrong (4xx): asking again cannot help."""


class GenerationStopped(Exception):
    """Generation was told to stop before the engine had anything to give for a request."""


@dataclass(frozen=True)
class Reply:
    """What a server answered."""

    status: int
    reason: str
    body: bytes


def open_client(concurrency: int, *, token: str | None = None) -> aiohttp.ClientSession:
    """A session of at most `concurrency` connections, past any proxy, in a running loop; the caller closes it.

    `token` is the router's. Idle connections are dropped before uvicorn drops them, which it does after 5 s.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=concurrency, keepalive_timeout=4.0),
        headers={"Authorization": f"Bearer {token}"} if token else None,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0),
    )


async def _post(
    client: aiohttp.ClientSession, url: str, body: Any, *, key: str = "", timeout_seconds: float | None = None
) -> Reply:
    timeout = aiohttp.ClientTimeout(total=timeout_seconds, sock_connect=10.0)
    headers = {ROUTING_KEY: key} if key else None
    async with client.post(url, json=body, headers=headers, timeout=timeout) as response:
        return Reply(response.status, response.reason or "", await response.read())


@dataclass(frozen=True)
class HttpGenerate:
    """Generate over HTTP. `timeout_seconds` bounds a request with all its attempts; the caller owns `client`.

    A server that says that nobody can serve now (503) is asked until the deadline, because an engine may be starting;
    other failures are tried again `retries` times. Once `stop` is set, what runs is aborted in the engines and answers
    with what it has, and nothing more is asked. Token ids are below `vocabulary`; 0 when that is not known. `work` sums
    up what the engines say that their completions cost.
    """

    url: str
    client: aiohttp.ClientSession
    timeout_seconds: float
    retries: int = 5
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    vocabulary: int = 0
    work: EngineWork = field(default_factory=EngineWork)

    async def __call__(self, request: GenerateRequest) -> Completion:
        """The completion of `request`.

        Raises RequestRefused for a 4xx answer, GenerationFailed when every attempt failed, TimeoutError after the
        deadline (the request is then aborted in the engines), UnsoundCompletion for one that cannot be trained on,
        GenerationStopped when there is none because of `stop`.
        """
        if self.stop.is_set():
            raise GenerationStopped(request.sample_id)
        problems: list[str] = []
        try:
            async with asyncio.timeout(self.timeout_seconds):
                answer = await self._until_stopped(request, problems)
        except TimeoutError:
            await self._abort(_rid(request, problems))
            late = f"sample {request.sample_id!r} had no answer within {self.timeout_seconds:g} s and was aborted"
            raise TimeoutError(": ".join([late, *problems[-1:]])) from None
        completion = parse_completion(request.sample_id, answer, vocabulary=self.vocabulary)
        self.work.add(request.sample_id, answer["meta_info"])
        return completion

    async def _until_stopped(self, request: GenerateRequest, problems: list[str]) -> Any:
        """What `_ask` gives or, after `stop`, what the aborted request has come to."""
        asking = asyncio.ensure_future(self._ask(request, problems))
        stopped = asyncio.ensure_future(self.stop.wait())
        try:
            await asyncio.wait({asking, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                await self._abort(_rid(request, problems))
                # An engine that the abort overtook knows nothing of it: the closed connection tells it.
                await asyncio.wait({asking}, timeout=ABORT_TIMEOUT_SECONDS)
            if not asking.done():
                raise GenerationStopped(request.sample_id)
            return asking.result()
        finally:
            asking.cancel()
            stopped.cancel()
            await asyncio.gather(asking, stopped, return_exceptions=True)

    async def _ask(self, request: GenerateRequest, problems: list[str]) -> Any:
        """The body of the first answer that is none of a failure; `problems` gets every one that is."""
        failures = 0
        while True:
            try:
                reply = await self._post(request, _rid(request, problems))
            except aiohttp.ClientError as error:
                problems.append(f"{type(error).__name__}: {error}".rstrip(": "))
                failures += 1
            else:
                if reply.status < 400:
                    return _body(request.sample_id, reply)
                problems.append(f"{reply.status} {sentence(reply)}")
                if reply.status < 500:
                    raise RequestRefused(f"sample {request.sample_id!r} was refused by {self.url}: {problems[-1]}")
                failures += reply.status != UNAVAILABLE
            if failures > self.retries:
                attempts = f"{len(problems)} attempts" if len(problems) > 1 else "1 attempt"
                raise GenerationFailed(
                    f"sample {request.sample_id!r} failed at {self.url} after {attempts}: {problems[-1]}"
                )
            await asyncio.sleep(_delay(len(problems)))

    async def _post(self, request: GenerateRequest, rid: str) -> Reply:
        body = {
            "rid": rid,
            "input_ids": request.input_ids,
            "sampling_params": request.sampling,
            "return_logprob": True,
        }
        # Samples of one group begin alike: a router that goes by keys sends them to one engine.
        return await _post(self.client, f"{self.url}/generate", body, key=request.sample_id.rpartition("-")[0])

    async def _abort(self, rid: str) -> None:
        """Best effort: the closed connection has told the engine, unless something between kept its own open."""
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            await _post(self.client, f"{self.url}/abort_request", {"rid": rid}, timeout_seconds=ABORT_TIMEOUT_SECONDS)


def _rid(request: GenerateRequest, problems: list[str]) -> str:
    """Of the next attempt: an engine may still be at work on one whose answer was lost, and refuses its name."""
    return f"{request.sample_id}~{len(problems)}" if problems else request.sample_id


def _delay(attempt: int) -> float:
    """Seconds after attempt `attempt`, from 1: doubling, and drawn so that retries do not come in step."""
    longest = min(FIRST_DELAY_SECONDS * 2 ** min(attempt - 1, 10), LONGEST_DELAY_SECONDS)
    return random.uniform(longest / 2, longest)


def sentence(reply: Reply) -> str:
    """What an error answer says, whichever of the usual shapes it has."""
    try:
        body = json.loads(reply.body)
    except ValueError:
        return reply.body.decode(errors="replace").strip()[:500] or reply.reason
    if isinstance(body, dict):
        found = body.get("error", body.get("message", body.get("detail", body)))
        return str(found.get("message", found) if isinstance(found, dict) else found)
    return str(body)


def _body(sample_id: str, reply: Reply) -> Any:
    try:
        return json.loads(reply.body)
    except ValueError:
        shown = reply.body[:200].decode(errors="replace")
        raise ValueError(f"sample {sample_id!r}: the answer is not JSON: {shown!r}") from None
