"""Everything that is measured on GPUs, one script after the other: `python tests/gpu/run_all.py [--only NAME,...]`.

Results are JSON in --out or $OUT; the table at the end says which parts ran, how long, and how they ended.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
PARTS = {
    "train": ["bench_train.py"],
    "engine": ["bench_engine.py", "--size", "0.6B"],
    "engine-1.7B": ["bench_engine.py", "--size", "1.7B"],
    "engine-4B": ["bench_engine.py", "--size", "4B"],
    "learn": ["learn.py", "--steps", "60"],
    "kills": ["learn.py", "--steps", "6", "--kills"],
    "two-gpus": ["bench_engine.py", "--size", "0.6B", "--apart"],
}


def run(name: str, more: list[str], out: Path, limit_seconds: float) -> dict[str, object]:
    """One part: its log is beside its results, its last lines are printed."""
    words = [sys.executable, str(HERE / PARTS[name][0]), *PARTS[name][1:], *more, "--out", str(out)]
    log, started = out / f"{name}.log", time.monotonic()
    with open(log, "w") as output:
        try:
            code = subprocess.run(words, stdout=output, stderr=subprocess.STDOUT, timeout=limit_seconds).returncode
        except subprocess.TimeoutExpired:
            code = -1
    lines = log.read_text(errors="replace").splitlines()
    print(f"== {name}: exit code {code}\n" + "\n".join(lines[-30:]), flush=True)
    return {"part": name, "exit_code": code, "seconds": round(time.monotonic() - started)}


def versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ("torch", "sglang", "megatron-core", "transformers", "ray", "prefect"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(name for name in PARTS if name != "two-gpus"))
    parser.add_argument("--limit-seconds", type=float, default=900.0, help="of one part")
    parser.add_argument("--set", action="append", default=[], dest="settings", help="section.field=value")
    parser.add_argument("--tiny", action="store_true", help="on a CPU, to see that the scripts run")
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    arguments = parser.parse_args()
    out = Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    more = ["--tiny"] if arguments.tiny else []
    settings = [word for setting in arguments.settings for word in ("--set", setting)]
    rows = []
    for name in arguments.only.split(","):
        own = settings if PARTS[name][0] != "bench_train.py" else []
        rows.append(run(name, [*more, *own], out, arguments.limit_seconds))
    record = {"date": time.strftime("%Y-%m-%d"), "versions": versions(), "parts": rows}
    (out / "run_all.json").write_text(json.dumps(record, indent=1))
    print("| part | exit code | seconds |\n|---|---|---|")
    for row in rows:
        print(f"| {row['part']} | {row['exit_code']} | {row['seconds']} |")
    sys.exit(any(row["exit_code"] for row in rows))


if __name__ == "__main__":
    main()
