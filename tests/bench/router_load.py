"""Engines that answer at once, the routers that stand in front of them, and a load generator: none is to be in the way.

Engines and generator speak HTTP/1.1 over bare sockets, because a library on either side would be what is measured.
"""

import asyncio
import json
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import psutil
import uvloop

READY_SECONDS = 60.0
SGLANG_ROUTER = "MILEPOST_SGLANG_ROUTER_PYTHON"  # an interpreter that has sglang-router, if this one has not
_END = b"\r\n\r\n"
_LAST_CHUNK = b"\r\n0\r\n\r\n"

Answer = Callable[[bytes, bytes], bytes]  # from path and body to body


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def response(body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: "
    return head + str(len(body)).encode() + _END + body


class _Engine(asyncio.Protocol):
    """One connection of an engine."""

    def __init__(self, answer: Answer) -> None:
        self._answer, self._came = answer, b""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._came += data
        while (request := _complete(self._came)) is not None:
            head, body, self._came = request
            method, _, path = head.partition(b"\r\n")[0].removesuffix(b" HTTP/1.1").partition(b" ")
            if method not in (b"GET", b"POST"):  # such as what HTTP/2 begins with
                self._transport.close()
                return
            self._transport.write(response(self._answer(path, body)))


def _complete(text: bytes) -> tuple[bytes, bytes, bytes] | None:
    """Head, body and rest, once all of a message has come. A body in chunks is left as it is."""
    end = text.find(_END)
    if end < 0:
        return None
    head, start = text[:end], end + len(_END)
    if b"chunked" in head.lower():
        last = text.find(_LAST_CHUNK, end + 2)
        return None if last < 0 else (head, text[start:last], text[last + len(_LAST_CHUNK) :])
    length = _length(head)
    return None if len(text) < start + length else (head, text[start : start + length], text[start + length :])


def _length(head: bytes) -> int:
    at = head.lower().find(b"content-length:")
    return int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0


async def _serve(port: int, answer: Answer) -> None:
    server = await asyncio.get_running_loop().create_server(lambda: _Engine(answer), "127.0.0.1", port)
    await server.serve_forever()


def small_answer(path: bytes, body: bytes) -> bytes:
    """What 16 tokens take."""
    return _SMALL if path == b"/generate" else b"{}"


_SMALL = json.dumps(
    {"text": "x" * 64, "output_ids": [1] * 16, "meta_info": {"prompt_tokens": 32, "completion_tokens": 16}}
).encode()


def _engine(port: int, answer: Answer) -> None:
    uvloop.run(_serve(port, answer))


@contextmanager
def engine(answer: Answer = small_answer, *, port: int = 0) -> Iterator[str]:
    """An engine in a process of its own; `kill` ends it before the block does."""
    port = port or free_port()
    child = multiprocessing.get_context("spawn").Process(target=_engine, args=(port, answer), daemon=True)
    child.start()
    try:
        _wait_until_ready(f"http://127.0.0.1:{port}", child.is_alive)
        yield f"http://127.0.0.1:{port}"
    finally:
        child.kill()
        child.join(10)


def kill_listener(url: str) -> None:
    """SIGKILL whoever listens at `url`."""
    port = int(url.rpartition(":")[2])
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
            psutil.Process(connection.pid).kill()


def _wait_until_ready(url: str, is_alive: Callable[[], bool]) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        if not is_alive():
            raise RuntimeError(f"what was to serve {url} has ended")
        with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
            return
        time.sleep(0.05)
    raise TimeoutError(f"{url} was not ready within {READY_SECONDS:g} s")


@contextmanager
def _command(words: list[str], url: str) -> Iterator[tuple[str, psutil.Process]]:
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        _wait_until_ready(url, lambda: process.poll() is None)
        yield url, psutil.Process(process.pid)
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()


@contextmanager
def milepost_router(workers: list[str], policy: str = "least_loaded") -> Iterator[tuple[str, psutil.Process]]:
    port = free_port()
    words = [sys.executable, "-c", "from milepost.flows.cli import main; main()", "router", "--port", str(port)]
    words += ["--policy", policy, "--no-access-log", *(word for url in workers for word in ("--worker", url))]
    with _command(words, f"http://127.0.0.1:{port}") as found:
        yield found


def sglang_router_python() -> str:
    """An interpreter that has sglang-router; empty when there is none."""
    python = os.environ.get(SGLANG_ROUTER, sys.executable)
    done = subprocess.run([python, "-c", "import sglang_router"], capture_output=True)
    return python if done.returncode == 0 else ""


@contextmanager
def sglang_router(workers: list[str], policy: str = "round_robin") -> Iterator[tuple[str, psutil.Process]]:
    port = free_port()
    words = [sglang_router_python(), "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    words += ["--policy", policy, "--log-level", "error", "--prometheus-port", str(free_port())]
    with _command([*words, "--worker-urls", *workers], f"http://127.0.0.1:{port}") as found:
        yield found


@dataclass
class Load:
    """What came of some requests: seconds of each that was answered with 200, and how many were not."""

    seconds: list[float] = field(default_factory=list)
    failed: int = 0
    wall: float = 0.0

    @property
    def per_second(self) -> float:
        return len(self.seconds) / self.wall

    def milliseconds(self, share: float) -> float:
        ordered = sorted(self.seconds)
        return 1000 * ordered[min(int(share * len(ordered)), len(ordered) - 1)]

    @property
    def median_ms(self) -> float:
        return 1000 * statistics.median(self.seconds)


async def ask(url: str, bodies: list[bytes], clients: int) -> Load:
    """POST each of `bodies` to /generate over `clients` connections that are kept, each on to the next when done."""
    load, left, started = Load(), iter(bodies), time.perf_counter()
    port = int(url.rpartition(":")[2])

    async def client() -> None:
        reader = writer = None
        for body in left:
            if writer is None:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
            before = time.perf_counter()
            try:
                assert reader is not None
                status = await _one(reader, writer, body)
            except (OSError, asyncio.IncompleteReadError):
                status = 0
            if status == 200:
                load.seconds.append(time.perf_counter() - before)
            else:
                load.failed += 1
                writer.close()
                reader = writer = None
        if writer is not None:
            writer.close()

    await asyncio.gather(*(client() for _ in range(clients)))
    load.wall = time.perf_counter() - started
    return load


async def _one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes) -> int:
    head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    writer.write(head.encode() + _END + body)
    answer = await reader.readuntil(_END)
    if b"chunked" in answer.lower():
        await _read_chunks(reader)
    else:
        await reader.readexactly(_length(answer))
    return int(answer.split(b" ", 2)[1])


async def _read_chunks(reader: asyncio.StreamReader) -> None:
    while size := int((await reader.readuntil(b"\r\n"))[:-2], 16):
        await reader.readexactly(size + 2)
    await reader.readexactly(2)


def run(url: str, bodies: list[bytes], clients: int) -> Load:
    return uvloop.run(ask(url, bodies, clients))
