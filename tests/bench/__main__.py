"""Every benchmark, one after the other: `python -m tests.bench`, or `make bench`."""

import subprocess
import sys
from pathlib import Path

# They run the demo, three times for a quarter of an hour the one and once the other, or a thousand steps: run them by
# themselves.
SLOW = {"bench_demo.py", "bench_regrade.py", "bench_pages.py"}


def main() -> None:
    for script in sorted(Path(__file__).parent.glob("bench_*.py")):
        if script.name not in SLOW:
            print(f"== {script.stem}", flush=True)
            subprocess.run([sys.executable, str(script)], check=True)


if __name__ == "__main__":
    main()
