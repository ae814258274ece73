"""Runs that are killed and resumed until they are done, and what is compared with a run that nobody disturbed."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from milepost.storage import files, manifest, runs
from milepost.storage.accounting import epoch_accounting
from milepost.storage.journal import StepStore
from milepost.storage.runs import RunFolder
from milepost.storage.tables import TableRef, read_table
from milepost.storage.verify import verify

MILEPOST = str(Path(sys.executable).parent / "milepost")
RUN = "chaos"
GROUPS = 4
POLL_SECONDS = 0.005
DEADLINE_SECONDS = 600.0

# What a victim's process is called; the flow is the command itself.
VICTIMS = {
    "engine": ("ray::FakeEngine", "ray::EmbeddedEngine"),
    "rank": ("ray::RankActor",),
    "router": ("ray::AppServer",),
    "grader": ("ray::_Grader",),
}


@dataclass(frozen=True)
class Case:
    """A run to disturb: where it goes, its settings, and its steps."""

    root: Path
    settings: list[str]
    steps: int

    @property
    def folder(self) -> RunFolder:
        return runs.run_folder(str(self.root), RUN)

    def command(self) -> list[str]:
        """Train, or go on: the same words do both."""
        words = [MILEPOST, "train", "--run", RUN, "--root", str(self.root), "--steps", str(self.steps)]
        return [*words, *(word for setting in self.settings for word in ("--set", setting))]


@dataclass
class Outcome:
    """What a disturbed run did: how often it was killed, and how it differs from the calm one."""

    kills: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)


@contextmanager
def started(case: Case) -> Iterator[subprocess.Popen[bytes]]:
    """The command in a session of its own; whatever it left is ended with it."""
    with open(case.root / "log", "ab") as log:
        process = subprocess.Popen(case.command(), stdout=log, stderr=log, start_new_session=True)
    try:
        yield process
    finally:
        family = _family(process.pid)
        for member in family:
            _kill(member)
        psutil.wait_procs(family, timeout=20)
        process.wait(20)


def _family(pid: int) -> list[psutil.Process]:
    try:
        parent = psutil.Process(pid)
        return [*parent.children(recursive=True), parent]
    except psutil.NoSuchProcess:
        return []


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return


def finish(case: Case) -> None:
    """Let the command run to its end; RuntimeError with its last words when it fails."""
    with started(case) as process:
        code = process.wait(DEADLINE_SECONDS)
    if code != 0:
        raise RuntimeError(f"the run ended with code {code}: {last_words(case)}")


def last_words(case: Case) -> str:
    return (case.root / "log").read_text(errors="replace")[-2000:]


def committed(folder: RunFolder) -> set[str]:
    """`step/slot` of every commit, and `step/manifest` of every finished step."""
    steps = [name for name in files.names(files.join(folder.uri, "steps")) if name.isdigit()]
    found = {
        f"{int(name)}/{commit.slot}" for name in steps for commit in StepStore(folder.step(int(name)), RUN, 0).commits()
    }
    return found | {f"{step}/manifest" for step in manifest.finished_steps(folder)}


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> bool:
    """Whether the condition came true before the process ended."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        if process.poll() is not None:
            return False
        if time.monotonic() > deadline:
            raise TimeoutError(f"nothing happened for {DEADLINE_SECONDS:g} s")
        time.sleep(POLL_SECONDS)
    return True


def _commit(case: Case, boundary: str) -> Path:
    """The file that is there once `step/slot`, or `step/manifest`, is committed."""
    step, slot = boundary.split("/")
    name = "manifest.json" if slot == "manifest" else f"journal/{slot}.json"
    return Path(case.folder.uri) / "steps" / f"{int(step):06d}" / name


def kill_flow_after(case: Case, boundary: str) -> bool:
    """SIGKILL the flow's process as soon as `boundary` is committed; false when it finished before."""
    with started(case) as process:
        if not wait_until(_commit(case, boundary).exists, process):
            return False
        os.kill(process.pid, signal.SIGKILL)
        process.wait(20)
    return True


def kill_in_turn(case: Case, moments: Mapping[str, str]) -> None:
    """SIGKILL each victim as soon as its boundary is committed; RuntimeError unless the run comes to its end."""
    with started(case) as process:
        for victim, boundary in moments.items():
            found = _victims(process.pid, victim) if wait_until(_commit(case, boundary).exists, process) else []
            if not found or process.poll() is not None:
                raise RuntimeError(f"no {victim} was there to be killed after {boundary}: {last_words(case)}")
            _kill(found[0])
        if process.wait(DEADLINE_SECONDS) != 0:
            raise RuntimeError(f"the run did not survive the death of {', '.join(moments)}: {last_words(case)}")


def kill_victim(case: Case, victim: str, generator: random.Random) -> bool:
    """SIGKILL a victim at a random moment after the first commit; false when the run was done before.

    Unless it was the flow's process, the run has to finish another step.
    """
    before = committed(case.folder)
    with started(case) as process:
        if not wait_until(lambda: committed(case.folder) != before, process):
            return False
        time.sleep(generator.uniform(0, 1.5))
        found = _victims(process.pid, victim)
        if not found or process.poll() is not None:
            return False
        steps = len(manifest.finished_steps(case.folder))
        _kill(generator.choice(found))
        if victim == "flow" or wait_until(lambda: len(manifest.finished_steps(case.folder)) > steps, process):
            return True
        if process.wait(DEADLINE_SECONDS) != 0:
            raise RuntimeError(f"the run did not survive the death of its {victim}: {last_words(case)}")
    return True


def _victims(pid: int, victim: str) -> list[psutil.Process]:
    """The processes of that kind in the family of a command."""
    family = _family(pid)
    return family[-1:] if victim == "flow" else [one for one in family if _title(one).startswith(VICTIMS[victim])]


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def facts(case: Case, *, real: bool) -> dict[str, object]:
    """What must not depend on kills: the digest of every table, the weights after every step, and the accounting.

    A real engine's own log-probabilities are left out of the digests: their last bits depend on which requests happened
    to be decoded together, which no two runs share. What is trained on, the trainer's, is not left out.
    """
    folder = case.folder
    found: dict[str, object] = {}
    for step in manifest.finished_steps(folder):
        closed = manifest.load(folder, step)
        found[f"{step}/weights"] = closed.version_out
        found[f"{step}/accounting"] = closed.accounting
        found[f"{step}/optimizer_steps"] = closed.metrics.get("train/optimizer_steps")
        for entry in closed.commits:
            for name, ref in entry["tables"].items():
                found[f"{step}/{entry['slot']}/{name}"] = _content(TableRef(**ref)) if real else ref["digest"]
    return found


def _content(ref: TableRef) -> str:
    table = read_table(ref)
    kept = [name for name in table.column_names if name != "rollout_logprobs"]
    return files.digest_of(repr(table.select(kept).to_pylist()).encode())


def served(case: Case) -> list[str]:
    """The prompts of every step, in the order of serving."""
    prompts: list[str] = []
    for step in manifest.finished_steps(case.folder):
        for entry in manifest.load(case.folder, step).commits:
            if entry["slot"].startswith("sample-"):
                prompts += read_table(TableRef(**entry["tables"]["prompts"]))["prompt_id"].to_pylist()
    return prompts


def compare(calm: Case, disturbed: Case, *, real: bool = False) -> list[str]:
    """Every fact in which the disturbed run differs."""
    expected, found = facts(calm, real=real), facts(disturbed, real=real)
    differences = [name for name in sorted({*expected, *found}) if expected.get(name) != found.get(name)]
    return differences + (["prompts"] if served(calm) != served(disturbed) else [])


def faults(case: Case) -> list[str]:
    """What is wrong with a run by itself: over-sampled ones depend on time, so there is no other to compare it with."""
    found = [fault.problem for fault in verify(case.folder).faults]
    for step in manifest.finished_steps(case.folder):
        trained = manifest.load(case.folder, step).accounting.get("trained", 0)
        found += [f"step {step} trained {trained} groups"] if trained != GROUPS else []
    for epoch, counts in epoch_accounting(case.folder).items():
        prompts, classes = counts["prompts"], sum(count for name, count in counts.items() if name != "prompts")
        found += [f"epoch {epoch} has {prompts} prompts and {classes} ends"] if classes != prompts else []
    return found


def settings_of(model_dir: str, prompts: str, *more: str) -> list[str]:
    return [
        f"model.path={json.dumps(model_dir)}",
        f"data.path={json.dumps(prompts)}",
        "data.apply_chat_template=false",
        f"data.rollout_batch_size={GROUPS}",
        "data.n_samples_per_prompt=4",
        "algorithm.num_steps_per_rollout=2",
        "model.context_length=32",
        "rollout.max_new_tokens=6",
        "rollout.shards=2",
        "reward.name=tests.rewards_for_tests:parity",
        "optimizer.lr=1e-3",
        "perf.train_threads=1",
        "engines.rollout_threads=1",
        "tracking.enabled=false",
        *more,
    ]
