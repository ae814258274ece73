"""What a router adds: latency of one client and requests a second of many, beside no router and sglang-router.

    python tests/bench/bench_router.py [--rounds 3]

Two engines answer at once, each in a process; so does the router; the clients are in this one. On few cores they share
them. For sglang-router install it (`pip install sglang-router==0.3.2`), or name an interpreter that has it in
MILEPOST_SGLANG_ROUTER_PYTHON.
"""

import argparse
import statistics
from contextlib import ExitStack

from router_load import Load, engine, milepost_router, run, sglang_router, sglang_router_python

BODY = b'{"input_ids": [' + b"7, " * 31 + b'7], "sampling_params": {"max_new_tokens": 16}}'


def row(name: str, alone: list[Load], many: list[Load]) -> str:
    median = statistics.median(load.median_ms for load in alone)
    p99 = statistics.median(load.milliseconds(0.99) for load in alone)
    rate = statistics.median(load.per_second for load in many)
    failed = sum(load.failed for load in [*alone, *many])
    return f"| {name} | {median:.2f} | {p99:.2f} | {rate:,.0f} | {failed} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=6000, help="of a round, by many clients; a quarter by one")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3, help="of each, in turn; medians are shown")
    options = parser.parse_args()
    with ExitStack() as stack:
        engines = [stack.enter_context(engine()) for _ in range(2)]
        paths = {"no router": engines[0], "milepost": stack.enter_context(milepost_router(engines))[0]}
        if sglang_router_python():
            paths["sglang-router"] = stack.enter_context(sglang_router(engines))[0]
        alone: dict[str, list[Load]] = {name: [] for name in paths}
        many: dict[str, list[Load]] = {name: [] for name in paths}
        for url in paths.values():
            run(url, [BODY] * 500, options.clients)  # warms up
        for _ in range(options.rounds):
            for name, url in paths.items():
                alone[name].append(run(url, [BODY] * (options.requests // 4), 1))
                many[name].append(run(url, [BODY] * options.requests, options.clients))
    print(
        f"| | median ms, 1 client | p99 ms | requests/s, {options.clients} clients | failed |",
        "|---|---|---|---|---|",
        sep="\n",
    )
    print(*(row(name, alone[name], many[name]) for name in paths), sep="\n", flush=True)


if __name__ == "__main__":
    main()
