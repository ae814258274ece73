"""Two processes never work on one run, and one that was away too long publishes nothing when it wakes up."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from milepost.flows.recipe import load_recipe
from milepost.flows.train import train
from milepost.storage import files, lease, manifest, runs
from milepost.storage.journal import Slot, StepStore
from milepost.storage.lease import LeaseHeld, LeaseLost, hold
from milepost.storage.manifest import StepManifest
from milepost.storage.runs import RunFolder

from .conftest import Prompts

SLOT = Slot("generate", 0, 1)

SMALL = [
    'engines.train="fake"',
    'engines.rollout="fake"',
    "data.apply_chat_template=false",
    "data.rollout_batch_size=4",
    "data.n_samples_per_prompt=2",
    "algorithm.num_steps_per_rollout=1",
    "model.context_length=32",
    "rollout.max_new_tokens=4",
    "rollout.shards=2",
    "reward.name=exact",
    "tracking.enabled=false",
]

OWNER = """
import sys
from milepost.storage import runs
from milepost.storage.journal import Slot, StepStore
from milepost.storage.lease import LeaseLost, hold

folder = runs.run_folder(sys.argv[1], "run")
with hold(folder, expiry_seconds=float(sys.argv[2])) as lease:
    print(lease.fence, flush=True)
    sys.stdin.readline()
    try:
        StepStore(folder.step(0), "run", 0, lease.fence).commit(Slot("generate", 0, 1), "k", {}, started=0.0)
        print("committed", flush=True)
    except LeaseLost as error:
        print(error, flush=True)
"""


class Owner:
    """A real process that holds the run until it is told to commit and end."""

    def __init__(self, root: Path, expiry_seconds: float) -> None:
        command = [sys.executable, "-c", OWNER, str(root), str(expiry_seconds)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.fence = int(self.process.stdout.readline())

    def commit(self) -> str:
        said, _ = self.process.communicate("\n", timeout=60)
        return said.strip()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return runs.run_folder(str(tmp_path), "run")


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Owner]:
    found = Owner(tmp_path, 60)
    yield found
    found.end()


def store(folder: RunFolder, fence: int) -> StepStore:
    return StepStore(folder.step(0), "run", 0, fence)


def rewrite_owner(folder: RunFolder, **changes: object) -> None:
    """As if claim 1 had been made by another process."""
    uri = files.join(folder.uri, "lease", "000001.json")
    claim = files.read_json(uri)
    files.publish_json(uri, claim | {"owner": claim["owner"] | changes}, overwrite=True)


def test_a_run_in_work_is_refused_to_a_second_process(folder: RunFolder, owner: Owner) -> None:
    with pytest.raises(
        LeaseHeld, match=rf"process {owner.process.pid} on .* works on .*run, and was last heard of \d+"
    ):
        with hold(folder):
            pass
    assert owner.commit() == "committed"
    assert store(folder, 0).committed(SLOT, "k").fence == owner.fence == 1


def test_one_process_cannot_hold_a_run_twice(folder: RunFolder) -> None:
    with hold(folder), pytest.raises(LeaseHeld, match=str(os.getpid())):
        with hold(folder):
            pass


def test_a_released_run_is_free_at_once_and_its_number_grows(folder: RunFolder) -> None:
    for fence in (1, 2, 3):
        with hold(folder) as held:
            assert held.fence == fence
            held.check()


def test_an_error_in_the_work_releases_the_run(folder: RunFolder) -> None:
    with pytest.raises(ZeroDivisionError, match="division"), hold(folder):
        print(1 / 0)
    with hold(folder) as held:
        assert held.fence == 2


def test_a_killed_owner_is_replaced_at_once(folder: RunFolder, owner: Owner) -> None:
    owner.process.send_signal(signal.SIGKILL)
    owner.process.wait()
    with hold(folder) as held:
        assert held.fence == 2


def test_a_killed_owner_that_nobody_waited_for_is_gone_too(folder: RunFolder, owner: Owner) -> None:
    os.kill(owner.process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, owner.process.pid, os.WEXITED | os.WNOWAIT)
    with hold(folder) as held:
        assert held.fence == 2


def hold_when_expired(folder: RunFolder, stack: ExitStack) -> lease.Lease:
    """The lease, as soon as the owner has been silent for a second."""
    while True:
        try:
            return stack.enter_context(hold(folder, expiry_seconds=1))
        except LeaseHeld:
            time.sleep(0.05)


def test_a_paused_owner_is_replaced_after_the_expiry_and_publishes_nothing_when_it_wakes(
    folder: RunFolder, tmp_path: Path
) -> None:
    owner = Owner(tmp_path, 1)
    with ExitStack() as stack:
        stack.callback(owner.end)
        owner.process.send_signal(signal.SIGSTOP)
        with pytest.raises(LeaseHeld, match="works on"), hold(folder):
            pass
        held = hold_when_expired(folder, stack)
        owner.process.send_signal(signal.SIGCONT)
        said = owner.commit()
        assert said.startswith(f"claim 1 on {folder.uri} is lost, claim 2 of process {os.getpid()}")
        assert store(folder, 0).commits() == []
        assert store(folder, held.fence).commit(SLOT, "k", {}, started=0.0).fence == 2


def test_a_commit_that_slips_through_between_check_and_publication_is_adopted(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as paused:
        paused.setattr(lease, "check_fence", lambda run_uri, fence: None)
        late = store(folder, 1).commit(SLOT, "k", {}, record={"by": "the old owner"}, started=0.0)
    with hold(folder) as first, hold(folder, clock=lambda: time.time() + 100) as second:
        assert (first.fence, second.fence) == (1, 2)
        assert store(folder, 2).commit(SLOT, "k", {}, record={"by": "the new owner"}, started=0.0) == late


def test_a_replaced_owner_closes_no_step(folder: RunFolder) -> None:
    closed = StepManifest("run", 0, "", "0-a", "1-b", "", {}, [], {}, {}, fence=1)
    with hold(folder) as first, hold(folder, clock=lambda: time.time() + 100):
        with pytest.raises(LeaseLost, match="claim 1 .* is lost, claim 2 of process"):
            first.check()
        with pytest.raises(LeaseLost, match="nothing more of it is stored"):
            manifest.publish(folder, closed)
    assert manifest.finished_steps(folder) == []


def test_a_step_that_the_owner_before_closed_in_the_same_way_stays(folder: RunFolder) -> None:
    first = StepManifest("run", 0, "", "0-a", "1-b", "", {"epoch": 0}, [], {"served": 8}, {"time/score": 1.0})
    manifest.publish(folder, first)
    manifest.publish(folder, replace(first, metrics={"time/score": 2.0}))
    assert manifest.load(folder, 0) == first
    with pytest.raises(files.AlreadyPublished, match="manifest.json"):
        manifest.publish(folder, replace(first, version_out="1-c"))


def test_the_heartbeat_decides_about_an_owner_on_another_host(folder: RunFolder) -> None:
    with hold(folder, clock=lambda: 1000.0) as held:
        rewrite_owner(folder, host="elsewhere", pid=2**22 + 1)
        held.beat()
        with pytest.raises(LeaseHeld, match="on elsewhere works on .* last heard of 60 s ago: .* silent for 60 s"):
            with hold(folder, clock=lambda: 1060.0):
                pass
        with hold(folder, clock=lambda: 1061.0) as taken:
            assert taken.fence == 2


def test_a_process_number_that_was_given_out_again_is_not_the_owner(folder: RunFolder) -> None:
    with hold(folder):
        rewrite_owner(folder, pid=os.getpid(), started=1.0)
        with hold(folder) as taken:
            assert taken.fence == 2


def test_the_heartbeat_is_written_while_the_owner_works(folder: RunFolder) -> None:
    beat = files.join(folder.uri, "lease", "000001.beat")
    with hold(folder, expiry_seconds=0.3):
        while not files.exists(beat):
            time.sleep(0.01)
    assert set(json.loads(files.read(beat))) == {"time"}


def test_a_heartbeat_that_fails_is_tried_again(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = iter([OSError(28, "No space left on device")] * 2)

    def publish_json(uri: str, value: object, *, overwrite: bool = False) -> None:
        for failure in failures:
            raise failure
        original(uri, value, overwrite=overwrite)

    original = files.publish_json
    with hold(folder, expiry_seconds=0.3):
        monkeypatch.setattr(files, "publish_json", publish_json)
        while not files.exists(files.join(folder.uri, "lease", "000001.beat")):
            time.sleep(0.01)


def test_a_release_that_fails_hides_no_result(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(uri: str, data: bytes, *, overwrite: bool = False) -> None:
        raise OSError(28, "No space left on device")

    with hold(folder):
        monkeypatch.setattr(files, "publish", full)


def test_a_run_folder_that_was_deleted_is_lost(folder: RunFolder) -> None:
    with hold(folder) as held:
        files.remove_folder(folder.uri)
        with pytest.raises(LeaseLost, match="claim 1 .* is lost, it was deleted"):
            held.check()


def test_exactly_one_of_many_processes_gets_the_run(folder: RunFolder, tmp_path: Path) -> None:
    command = [sys.executable, "-c", OWNER, str(tmp_path), "60"]
    pipe = subprocess.PIPE
    racing = [subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) for _ in range(3)]
    with ExitStack() as stack:
        for process in racing:
            stack.callback(process.communicate)
            stack.callback(process.kill)
        for _ in range(1200):
            if sum(process.poll() is None for process in racing) == 1:
                break
            time.sleep(0.05)
        winner = next(process for process in racing if process.poll() is None)
        assert winner.stdout.readline() == "1\n"
        errors = [process.communicate()[1] for process in racing if process is not winner]
        assert all(f"LeaseHeld: process {winner.pid} on" in error for error in errors)


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_server", "ray_cluster")
def test_a_training_run_is_leased_and_says_so_in_all_it_stores(
    tmp_path: Path, folder: RunFolder, model_dir: str, prompts: Prompts
) -> None:
    overrides = [*SMALL, f"model.path={model_dir}", f"data.path={prompts()}"]
    chosen, _ = load_recipe(None, overrides)
    sections = {name: getattr(chosen, name) for name in type(chosen).model_fields}
    with hold(folder), pytest.raises(LeaseHeld, match=f"process {os.getpid()} on"):
        asyncio.run(train(run="run", root=str(tmp_path), steps=1, **sections))
    assert files.names(folder.uri) == ["lease"]
    asyncio.run(train(run="run", root=str(tmp_path), steps=1, **sections))
    assert manifest.load(folder, 0).fence == 2
    assert {commit.fence for commit in store(folder, 0).commits()} == {2}
    assert files.exists(files.join(folder.uri, "lease", "000002.released"))
