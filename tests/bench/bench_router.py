"""What the router adds to a request: latency one at a time and throughput at a given concurrency, against going direct.

Run as `python tests/bench/bench_router.py`; engine and router get a process each.
"""

import argparse
import asyncio
import json
import multiprocessing
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp
import uvicorn

from milepost.router.app import build_app

ANSWER = json.dumps(
    {"text": "x" * 2000, "meta_info": {"output_token_logprobs": [[-0.123456, 17, None]] * 512}}
).encode()


async def engine(scope: Any, receive: Any, send: Any) -> None:
    """Answers everything at once with as much as 512 tokens take."""
    if scope["type"] != "http":
        return
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": ANSWER})


def _serve(port: int, backend: str | None) -> None:
    app: Any = engine if backend is None else build_app([backend])
    uvicorn.run(app, port=port, log_level="critical", loop="uvloop", http="httptools")


@contextmanager
def process(port: int, backend: str | None = None) -> Iterator[str]:
    child = multiprocessing.get_context("spawn").Process(target=_serve, args=(port, backend), daemon=True)
    child.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        child.terminate()
        child.join(10)


async def ready(client: aiohttp.ClientSession, url: str) -> None:
    for _ in range(300):
        try:
            async with client.get(f"{url}/health") as answer:
                if answer.status == 200:
                    return
        except aiohttp.ClientError:
            pass
        await asyncio.sleep(0.1)
    raise TimeoutError(f"{url} is not ready after 30 s")


async def measure(url: str, requests: int, concurrency: int) -> dict[str, float]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        await ready(client, url)

        async def one() -> float:
            started = time.perf_counter()
            async with client.post(f"{url}/generate", json={"input_ids": [1] * 256}) as answer:
                assert len(await answer.read()) == len(ANSWER)
            return time.perf_counter() - started

        alone = sorted([await one() for _ in range(requests // 4)])
        gate = asyncio.Semaphore(concurrency)

        async def gated() -> None:
            async with gate:
                await one()

        started = time.perf_counter()
        await asyncio.gather(*(gated() for _ in range(requests)))
        return {
            "median_ms": 1000 * statistics.median(alone),
            "p99_ms": 1000 * alone[int(0.99 * (len(alone) - 1))],
            "requests_per_second": requests / (time.perf_counter() - started),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--port", type=int, default=18400, help="this port and the next one are used")
    options = parser.parse_args()
    with process(options.port) as direct, process(options.port + 1, direct) as routed:
        for name, url in (("direct", direct), ("routed", routed)):
            found = asyncio.run(measure(url, options.requests, options.concurrency))
            print(json.dumps({"path": name, **{key: round(value, 3) for key, value in found.items()}}))


if __name__ == "__main__":
    main()
