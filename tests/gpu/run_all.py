"""Everything that is measured on GPUs: `python tests/gpu/run_all.py [--parts train,engine,learn,kill] [--gpus 1]`.

Each part is a script with a time budget, ended with all its processes at its limit; the others run whatever became of
it. Writes one JSON a part and table.md into --out or $OUT. Parts in calls of their own fit ten minutes each: `kill`
keeps its runs in --root, so that a second call goes on with them.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from commands import Ended, leaving_nothing, run
from result_table import table
from stored_runs import SGLANG

HERE = Path(__file__).parent
MARGIN_SECONDS = 15.0  # between a part's own limit and when it is told to end, and from then to when it is killed
LAST_LINES = 40
PACKAGES = ("torch", "sglang", "megatron-core", "transformers", "ray", "prefect", "nvidia-nccl-cu13")


@dataclass(frozen=True)
class Part:
    """A script with its arguments; `settings` is false for one that takes no `--set`."""

    script: str
    arguments: tuple[str, ...] = ()
    gpus: int = 1
    limit_seconds: float = 560.0
    settings: bool = True

    @property
    def result(self) -> str:
        return f"{Path(self.script).stem}.json"


PARTS = {
    "train": Part("bench_train.py", settings=False),
    "engine": Part("bench_engine.py", ("--sizes", "0.6B,smollm2", "--set", f"engines.sglang={json.dumps(SGLANG)}")),
    "learn": Part("learn.py"),
    "kill": Part("kill.py"),
    "two": Part("two_gpus.py", gpus=2),
}


def words(name: str, limit_seconds: float, arguments: argparse.Namespace) -> list[str]:
    """The part's own arguments first, so that what was asked for here holds."""
    part = PARTS[name]
    found = [sys.executable, str(HERE / part.script), *(["--tiny"] if arguments.tiny else part.arguments)]
    found += ["--out", arguments.out, "--limit-seconds", str(limit_seconds)]
    found += ["--root", arguments.root] if name == "kill" else []
    found += ["--sizes", arguments.sizes] if arguments.sizes and name in ("train", "engine") else []
    found += ["--cases", arguments.cases] if arguments.cases and name in ("kill", "two") else []
    return [*found, *(word for setting in arguments.settings if part.settings for word in ("--set", setting))]


def run_part(name: str, limit_seconds: float, arguments: argparse.Namespace) -> dict[str, Any]:
    """One part; what it printed last is printed, and returned as its table."""
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        own = limit_seconds - MARGIN_SECONDS
        chosen = words(name, own, arguments)
        ended = run(chosen, limit_seconds=limit_seconds, grace_seconds=MARGIN_SECONDS, output=log)
        log.seek(0)
        lines = log.read().splitlines()
    print(f"== {name}: {outcome(ended)} after {ended.seconds:.0f} s", *lines[-LAST_LINES:], sep="\n", flush=True)
    return {"part": name, "outcome": outcome(ended), "seconds": ended.seconds, "tables": last_tables(lines)}


def last_tables(lines: list[str]) -> list[str]:
    """What a script printed last of rows, with the empty lines between tables; it may have printed others before."""
    last = max((number for number, line in enumerate(lines) if line.startswith("| ")), default=-1)
    first = last
    while first > 0 and (lines[first - 1].startswith("| ") or not lines[first - 1]):
        first -= 1
    return lines[first : last + 1] if last >= 0 else []


def outcome(ended: Ended) -> str:
    if not ended.in_time:
        return "out of time"
    return "done" if ended.exit_code == 0 else f"exit code {ended.exit_code}"


def versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    return found


def markdown(rows: list[dict[str, Any]]) -> str:
    """What ran where, how it ended, and the tables that parts printed."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    found = ", ".join(f"{name} {number}" for name, number in versions().items())
    lines = [f"# {max(1, torch.cuda.device_count())} x {device}, {time.strftime('%Y-%m-%d')}", "", found, ""]
    ended = [[row["part"], row["outcome"], row["seconds"], PARTS[row["part"]].result] for row in rows]
    lines += [table(["part", "outcome", "seconds", "result"], ended)]
    for row in rows:
        if row["tables"]:
            lines += ["", f"## {row['part']}", "", *row["tables"]]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="", help="of " + ", ".join(PARTS) + "; by default all that the GPUs allow")
    parser.add_argument("--gpus", type=int, default=max(1, torch.cuda.device_count()))
    parser.add_argument("--sizes", default="", help="of models, for train and engine, such as 0.6B,1.7B,4B")
    parser.add_argument("--cases", default="", help="of kill or two, such as calm or apart; by default all")
    parser.add_argument("--limit-seconds", type=float, default=0.0, help="of each part; by default its own budget")
    parser.add_argument("--root", default=str(Path(tempfile.gettempdir()) / "milepost-gpu-kill"))
    parser.add_argument("--set", action="append", default=[], dest="settings", help="section.field=value")
    parser.add_argument("--tiny", action="store_true", help="on a CPU, to see that the scripts run")
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    arguments = parser.parse_args()
    names = arguments.parts.split(",") if arguments.parts else [n for n, p in PARTS.items() if p.gpus <= arguments.gpus]
    if unknown := set(names) - set(PARTS):
        parser.error(f"--parts has {sorted(unknown)}, known are {list(PARTS)}")
    out = Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    with leaving_nothing():
        for name in names:
            rows.append(run_part(name, arguments.limit_seconds or PARTS[name].limit_seconds, arguments))
            (out / "table.md").write_text(markdown(rows))
    print(markdown(rows), flush=True)
    return int(any(row["outcome"] != "done" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
