"""Asking over HTTP for one completion from an engine or a router that speaks SGLang's `/generate`.

What comes back is checked here: as many finite log-probabilities as tokens, and a weight version, or it is an error.
"""

import asyncio
import contextlib
import json
import math
import random
from dataclasses import dataclass
from typing import Any, Literal, cast

import aiohttp

from milepost.engines.protocols import Completion, GenerateRequest, WeightVersion

FIRST_DELAY_SECONDS = 0.2
LONGEST_DELAY_SECONDS = 5.0
ABORT_TIMEOUT_SECONDS = 5.0
UNAVAILABLE = 503

FinishReason = Literal["stop", "length", "abort"]


class GenerationFailed(ConnectionError):
    """No attempt inside the deadline gave an answer; asking again later may."""


class RequestRefused(ValueError):
    """The engine called the request wrong (4xx): asking again cannot help."""


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


async def _post(client: aiohttp.ClientSession, url: str, body: Any, *, timeout_seconds: float | None = None) -> Reply:
    timeout = aiohttp.ClientTimeout(total=timeout_seconds, sock_connect=10.0)
    async with client.post(url, json=body, timeout=timeout) as response:
        return Reply(response.status, response.reason or "", await response.read())


@dataclass(frozen=True)
class HttpGenerate:
    """Generate over HTTP. `timeout_seconds` bounds a request with all its attempts; the caller owns `client`.

    A server that says that nobody can serve now (503) is asked until the deadline, because an engine may be starting;
    other failures are tried again `retries` times.
    """

    url: str
    client: aiohttp.ClientSession
    timeout_seconds: float
    retries: int = 5

    async def __call__(self, request: GenerateRequest) -> Completion:
        """The completion of `request`.

        Raises RequestRefused for a 4xx answer, GenerationFailed when every attempt failed, TimeoutError after the
        deadline (the request is then aborted in the engines), ValueError for an answer that is not sound.
        """
        problems: list[str] = []
        try:
            async with asyncio.timeout(self.timeout_seconds):
                answer = await self._ask(request, problems)
        except TimeoutError:
            await self._abort(_rid(request, problems))
            late = f"sample {request.sample_id!r} had no answer within {self.timeout_seconds:g} s and was aborted"
            raise TimeoutError(": ".join([late, *problems[-1:]])) from None
        return parse_completion(request.sample_id, answer)

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
        return await _post(self.client, f"{self.url}/generate", body)

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


def parse_completion(sample_id: str, answer: Any) -> Completion:
    """SGLang's answer as a Completion; ValueError names the sample and what is wrong with it."""
    try:
        meta = answer["meta_info"]
        kind = meta["finish_reason"]["type"]
        # A request that was aborted before its first token has no list of log-probabilities.
        entries = meta.get("output_token_logprobs", []) if kind == "abort" else meta["output_token_logprobs"]
        pairs = [(entry[0], entry[1]) for entry in entries]
        last = WeightVersion.parse(meta["weight_version"])
        first = WeightVersion.parse(_first_version(meta))
        ids = [int(token) for token in answer.get("output_ids", [token for _, token in pairs])]
        text = answer["text"]
    except KeyError as error:
        raise ValueError(f"sample {sample_id!r}: the answer has no {error}") from None
    except (TypeError, AttributeError, IndexError, ValueError) as error:
        raise ValueError(f"sample {sample_id!r}: the answer is not SGLang's: {error}") from None
    if not isinstance(text, str):
        raise ValueError(f"sample {sample_id!r}: the answer's text is {text!r}, not a string")
    if kind not in ("stop", "length", "abort"):
        raise ValueError(f"sample {sample_id!r}: finish reason {kind!r} is none of stop, length, abort")
    logprobs = _checked_logprobs(sample_id, ids, pairs)
    return Completion(text, ids, logprobs, cast(FinishReason, kind), first, last)


def _first_version(meta: Any) -> str:
    """The version that made the first token: SGLang lists them all, the embedded engine names a first that differs."""
    spans = meta.get("weight_versions")
    version: str = spans[0]["version"] if spans else meta.get("weight_version_first") or meta["weight_version"]
    return version


def _checked_logprobs(sample_id: str, ids: list[int], pairs: list[tuple[Any, Any]]) -> list[float]:
    if len(ids) != len(pairs):
        raise ValueError(f"sample {sample_id!r}: {len(ids)} tokens came with {len(pairs)} log-probabilities")
    for position, (token, (logprob, of)) in enumerate(zip(ids, pairs, strict=True)):
        if token != of:
            raise ValueError(f"sample {sample_id!r}: token {position} is {token}, its log-probability is of {of}")
        if isinstance(logprob, bool) or not isinstance(logprob, int | float) or not math.isfinite(logprob):
            raise ValueError(f"sample {sample_id!r}: token {position} has the log-probability {logprob}")
    return [float(logprob) for logprob, _ in pairs]
