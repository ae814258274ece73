"""What a run of many steps costs Prefect's server: bytes a step in its database, and seconds for what its pages ask.

python tests/bench/bench_pages.py [STEPS]

The server is one of its own, the engines are fake, and all else is as by default. Events of task runs are counted
apart: they are removed again after minutes.
"""

import os
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
from bench_deploy import MILEPOST, RECIPE, prepare

from milepost.flows import services
from milepost.flows.launches import TASK_EVENT_SECONDS

REPEATS = 3


def database_bytes(path: Path) -> tuple[int, int]:
    """Bytes of all pages but those of events, and of those; an empty database has a megabyte and a half."""
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as database:
        sizes = dict(database.execute("select name, sum(pgsize) from dbstat group by name"))
    events = sum(size for name, size in sizes.items() if "event" in name)
    return sum(sizes.values()) - events, events


def asked_by_the_page(flow_run: str) -> list[tuple[str, str, dict[str, Any] | None]]:
    """The larger requests of the page of a run, as the browser sends them."""
    below = {"flow_runs": {"parent_flow_run_id": {"any_": [flow_run]}}}
    of_it = {"flow_runs": {"id": {"any_": [flow_run]}}}
    logs = {"logs": {"flow_run_id": {"any_": [flow_run]}}, "sort": "TIMESTAMP_ASC", "limit": 200}
    return [
        ("the run", f"/flow_runs/{flow_run}", None),
        ("its graph", f"/flow_runs/{flow_run}/graph-v2", None),
        ("its steps, 10 of them", "/flow_runs/paginate", {**below, "sort": "START_TIME_DESC", "limit": 10}),
        ("its task runs, counted", "/task_runs/count", of_it),
        ("its logs, 200 of them", "/logs/filter", logs),
        ("its artifacts", "/artifacts/latest/filter", of_it),
        ("all runs, 100 of them", "/flow_runs/paginate", {"sort": "START_TIME_DESC", "limit": 100}),
    ]


def ask(url: str, body: dict[str, Any] | None) -> tuple[float, int]:
    """The shortest time of a few, and the bytes of the answer."""
    seconds = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        answer = httpx.get(url, timeout=60) if body is None else httpx.post(url, json=body, timeout=60)
        seconds.append(time.perf_counter() - begun)
        answer.raise_for_status()
    return min(seconds), len(answer.content)


def main(steps: int) -> None:
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        os.environ |= {"MILEPOST_HOME": path, "PREFECT_HOME": f"{path}/prefect"}
        os.environ.pop("PREFECT_API_URL", None)
        prepare(folder)
        (folder / "tiny.yaml").write_text(RECIPE.replace(", shards: 1", ""))
        found = services.up(path, say=lambda text: None, mlflow=False, ray=False)
        try:
            command = [MILEPOST, "train", "--config", "tiny.yaml", "--run", "long", "--steps", str(steps)]
            subprocess.run(command, check=True, cwd=folder, stdout=subprocess.DEVNULL)
            rest, events = database_bytes(folder / "prefect" / "prefect.db")
            print(f"{rest / steps / 1e3:.0f} kB a step in Prefect's database, after {steps} steps")
            print(f"{events / 1e6:.0f} MB of events, those of task runs for {TASK_EVENT_SECONDS} s or a little more")
            runs = {"flow_runs": {"name": {"any_": ["long"]}}}
            (flow_run,) = httpx.post(f"{found.prefect_url}/flow_runs/filter", json=runs, timeout=60).json()
            for what, place, body in asked_by_the_page(flow_run["id"]):
                seconds, size = ask(f"{found.prefect_url}{place}", body)
                print(f"{what}: {seconds:.2f} s, {size / 1e3:.0f} kB")
        finally:
            services.down(say=lambda text: None)


if __name__ == "__main__":
    main(int([*sys.argv[1:], "1000"][0]))
