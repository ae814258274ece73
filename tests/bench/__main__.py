"""Every benchmark, one after the other: `python -m tests.bench`, or `make bench`; with names, those alone."""

import subprocess
import sys
from pathlib import Path

# They run the demo, three times for a quarter of an hour the one and once the other, or a thousand steps: run them by
# themselves.
SLOW = {"bench_demo.py", "bench_regrade.py", "bench_pages.py"}


def main(names: list[str]) -> None:
    scripts = {path.stem.removeprefix("bench_"): path for path in sorted(Path(__file__).parent.glob("bench_*.py"))}
    unknown = [name for name in names if name not in scripts]
    if unknown:
        sys.exit(f"no benchmark is called {unknown[0]!r}: choose among {', '.join(scripts)}")
    for name in names or [name for name, path in scripts.items() if path.name not in SLOW]:
        print(f"== bench_{name}", flush=True)
        subprocess.run([sys.executable, str(scripts[name])], check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
