"""Requests that are lost when engines die behind a router, and what a long time under load leaves behind.

    python tests/bench/bench_router_faults.py [--seconds 60] [--soak-seconds 0]

First one of two engines is killed under 16 clients. Then each is killed and started again in turn. A soak of, say, 600
seconds prints the router's memory and open files on the way.
"""

import argparse
import asyncio
import time
from contextlib import ExitStack

import psutil
import uvloop
from router_load import Load, ask, engine, kill_listener, milepost_router, sglang_router, sglang_router_python

BODY = b'{"input_ids": [7, 7, 7]}'
CLIENTS = 16
DEAD_SECONDS = 2.0
SAMPLES = 10


def killed_once(url: str, victim: str, requests: int) -> Load:
    """Kill `victim` a third into the requests."""

    async def both() -> Load:
        first = await ask(url, [BODY] * (requests // 3), CLIENTS)
        asking = asyncio.create_task(ask(url, [BODY] * (requests - requests // 3), CLIENTS))
        await asyncio.sleep(0)
        kill_listener(victim)
        rest = await asking
        return Load([*first.seconds, *rest.seconds], first.failed + rest.failed, first.wall + rest.wall)

    return uvloop.run(both())


def in_turn(url: str, engines: list[str], seconds: float) -> Load:
    """Kill each engine and start it again at its port, one after the other, while clients ask."""
    whole, until = Load(), time.monotonic() + seconds

    async def asked(stop: asyncio.Event) -> None:
        while not stop.is_set():
            found = await ask(url, [BODY] * 500, CLIENTS)
            whole.seconds += found.seconds
            whole.failed += found.failed

    async def both(stack: ExitStack) -> None:
        stop = asyncio.Event()
        asking = asyncio.create_task(asked(stop))
        while time.monotonic() < until:
            for victim in engines:
                await asyncio.to_thread(kill_listener, victim)
                await asyncio.sleep(DEAD_SECONDS)
                port = int(victim.rpartition(":")[2])
                await asyncio.to_thread(stack.enter_context, engine(port=port))
                await asyncio.sleep(2 * DEAD_SECONDS)  # until it is probed and found well
        stop.set()
        await asking

    with ExitStack() as stack:
        uvloop.run(both(stack))
    return whole


def soak(url: str, router: psutil.Process, seconds: float) -> list[tuple[float, float, int, int]]:
    """Minutes, MiB of memory, open files, and requests so far, some times over."""
    found, started, asked = [], time.monotonic(), 0
    for part in range(SAMPLES):
        while time.monotonic() < started + seconds * (part + 1) / SAMPLES:
            asked += len(uvloop.run(ask(url, [BODY] * 2000, CLIENTS)).seconds)
        memory = router.memory_info().rss / 2**20
        found.append(((time.monotonic() - started) / 60, memory, router.num_fds(), asked))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--seconds", type=float, default=60.0, help="of killing engines in turn")
    parser.add_argument("--soak-seconds", type=float, default=0.0)
    options = parser.parse_args()
    routers = {"milepost": milepost_router} | ({"sglang-router": sglang_router} if sglang_router_python() else {})
    print(
        "| | one of two engines killed: answered | failed | killed in turn: answered | failed |",
        "|---|---|---|---|---|",
        sep="\n",
    )
    for name, router in routers.items():
        with ExitStack() as stack:
            engines = [stack.enter_context(engine()) for _ in range(2)]
            url, _ = stack.enter_context(router(engines))
            once = killed_once(url, engines[0], options.requests)
            stack.enter_context(engine(port=int(engines[0].rpartition(":")[2])))
            time.sleep(2 * DEAD_SECONDS)
            turns = in_turn(url, engines, options.seconds)
        print(f"| {name} | {len(once.seconds)} | {once.failed} | {len(turns.seconds)} | {turns.failed} |", flush=True)
    if options.soak_seconds:
        with ExitStack() as stack:
            engines = [stack.enter_context(engine()) for _ in range(2)]
            url, process = stack.enter_context(milepost_router(engines))
            print("\n| minutes | MiB | open files | requests |", "|---|---|---|---|", sep="\n")
            for minutes, memory, files, asked in soak(url, process, options.soak_seconds):
                print(f"| {minutes:.1f} | {memory:.0f} | {files} | {asked:,} |", flush=True)


if __name__ == "__main__":
    main()
