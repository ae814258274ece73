"""The long chaos run: kills at boundaries and at random moments, and a table of what was lost.

python -m tests.chaos [--random 40] [--seed 0] [--engines fake|real]      (or `make chaos`)
"""

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path

from milepost.engines.tiny_model import write_tiny_model
from milepost.engines.tokenizer import load_tokenizer, write_character_tokenizer
from milepost.storage.manifest import finished_steps
from tests.chaos.harness import (
    Case,
    compare,
    facts,
    finish,
    kill_flow_after,
    kill_victim,
    served,
    settings_of,
)

VICTIMS = ("flow", "engine", "rank", "router", "grader")
BOUNDARIES = ("sample-r0", "generate-r0-s000", "score-r0-s001", "filter-r0-s000", "optimize-r0", "manifest")
FAKE = ["engines.train=fake", "engines.rollout=fake"]


def prepare(root: Path) -> tuple[str, str]:
    """A tiny model and six prompts."""
    model, prompts = root / "model", root / "prompts.jsonl"
    write_character_tokenizer(str(model), "0123456789+-*=")
    vocabulary = load_tokenizer(str(model)).vocab_size
    write_tiny_model(str(model), vocab_size=vocabulary, hidden=32, layers=2, heads=4, kv_heads=2, seed=0)
    rows = [{"prompt": f"{number}+1=", "label": str(number + 1)} for number in range(6)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(model), str(prompts)


def disturb(case: Case, *, kills: int, generator: random.Random) -> dict[str, int]:
    """Kill the flow after every stage, then every victim in turn at random moments; how often each was killed."""
    done = {victim: 0 for victim in VICTIMS}
    for step, slot in enumerate(BOUNDARIES):
        done["flow"] += kill_flow_after(case, f"{step}/{slot}")
    for number in range(kills):
        victim = VICTIMS[number % len(VICTIMS)]
        done[victim] += kill_victim(case, victim, generator)
        print(f"{number + 1}/{kills} {victim}, at step {len(finished_steps(case.folder))}", flush=True)
    return done


def losses(calm: Case, disturbed: Case, *, real: bool) -> dict[str, int]:
    """What the kills cost, in the words of the promise."""
    expected, found = served(calm), served(disturbed)
    differing = compare(calm, disturbed, real=real)
    steps_of = (facts(case, real=real) for case in (calm, disturbed))
    applied = [sum(value for name, value in fact.items() if name.endswith("optimizer_steps")) for fact in steps_of]
    return {
        "lost prompts": len([prompt for prompt in set(expected) if found.count(prompt) < expected.count(prompt)]),
        "duplicated prompts": len([prompt for prompt in set(found) if found.count(prompt) > expected.count(prompt)]),
        "regenerated committed samples": len([name for name in differing if "/generate-" in name]),
        "double steps": int(applied[1] - applied[0]),
        "weight mismatches": len([name for name in differing if name.endswith("/weights")]),
        "other differences": len([name for name in differing if not name.endswith("/weights")]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--random", type=int, default=40, help="kills at random moments")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engines", choices=["fake", "real"], default="fake")
    options = parser.parse_args()
    real = options.engines == "real"
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        model, prompts = prepare(root)
        settings = settings_of(model, prompts, "checkpoint.every_steps=2", *([] if real else FAKE))
        for name in ("calm", "disturbed"):
            (root / name).mkdir()
        endless = Case(root / "disturbed", settings, 1_000_000)
        done = disturb(endless, kills=options.random, generator=random.Random(options.seed))
        steps = len(finished_steps(endless.folder)) + 1
        calm, disturbed = (Case(root / name, settings, steps) for name in ("calm", "disturbed"))
        for case in (disturbed, calm):
            finish(case)
        found = losses(calm, disturbed, real=real)
    print("| kills | " + " | ".join(found) + " |\n|" + "---|" * (len(found) + 1))
    killed = ", ".join(f"{count} {victim}" for victim, count in done.items())
    row = [f"{sum(done.values())} in {steps} steps: {killed}", *map(str, found.values())]
    print(f"| {' | '.join(row)} |")
    sys.exit(any(found.values()))


if __name__ == "__main__":
    main()
