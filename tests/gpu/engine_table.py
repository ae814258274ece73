"""What bench_engine.py measured, as tables of a line a case."""

from typing import Any

from result_table import table

_LOGPROBS = ["mean log-prob difference before", "after", "largest before", "after"]


def tables(results: list[dict[str, Any]]) -> str:
    """Tokens a second, pushes, and memory that changed hands, of every size that was measured."""
    measured = [result for result in results if "error" not in result]
    speeds = [
        [result["size"], *(row[name] for name in ("requests", "direct", "routed", "ratio"))]
        for result in measured
        for row in result["speeds"]
    ]
    pushes = [_push(result["size"], row) for result in measured for row in result["pushes"]]
    memory = [[result["size"], name, seconds] for result in measured for name, seconds in result["memory"].items()]
    return "\n\n".join(
        [
            table(["size", "requests", "tokens/s asked directly", "through the router", "ratio"], speeds),
            table(["size", "transport", "first push, s", "last, s", "last, GB/s", *_LOGPROBS, "error"], pushes),
            table(["size", "memory", "seconds"], memory),
        ]
    )


def _push(size: str, row: dict[str, Any]) -> list[Any]:
    pushed = [metrics for name, metrics in row.items() if name.startswith("push ")] or [{}]
    figures = [pushed[0].get("sync/seconds"), pushed[-1].get("sync/seconds")]
    figures += [pushed[-1].get("sync/gigabytes_per_second")]
    figures += [row.get(when, {}).get(kind) for kind in ("mean", "max") for when in ("before", "after")]
    return [size, row["transport"], *figures, row.get("error")]
