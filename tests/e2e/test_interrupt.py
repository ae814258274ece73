"""Ctrl-C and SIGTERM: one sentence, nothing left running, and a run whose finished steps stand."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from milepost.storage import manifest, runs

pytestmark = pytest.mark.slow

MILEPOST = str(Path(sys.executable).parent / "milepost")
SETTINGS = [
    "engines.train=fake",
    "engines.rollout=fake",
    "data.apply_chat_template=false",
    "data.rollout_batch_size=4",
    "data.n_samples_per_prompt=2",
    "algorithm.num_steps_per_rollout=1",
    "model.context_length=32",
    "rollout.max_new_tokens=4",
    "reward.name=exact",
]


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def as_from_a_terminal() -> None:
    """A test that was started in the background would hand down an ignored SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize(("number", "to_group", "code"), [(signal.SIGINT, True, 130), (signal.SIGTERM, False, 143)])
def test_an_interrupted_run_leaves_nothing_running(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    model_dir: str,
    prompts: Callable[..., str],
    number: signal.Signals,
    to_group: bool,
    code: int,
) -> None:
    settings = [*SETTINGS, f"model.path={model_dir}", f"data.path={prompts()}"]
    command = [MILEPOST, "train", "--run", "stopped", "--root", str(tmp_path), "--steps", "100000"]
    command += [word for setting in settings for word in ("--set", setting)]
    with open(tmp_path / "stderr", "wb") as errors:
        process = subprocess.Popen(
            command, stdout=errors, stderr=errors, start_new_session=True, preexec_fn=as_from_a_terminal
        )
    request.addfinalizer(process.kill)
    folder = runs.run_folder(str(tmp_path), "stopped")
    assert wait_for(lambda: len(manifest.finished_steps(folder)) > 1, 180), (tmp_path / "stderr").read_text()
    started = psutil.Process(process.pid).children(recursive=True)
    assert len(started) > 3
    os.killpg(process.pid, number) if to_group else process.send_signal(number)
    assert process.wait(30) == code, (tmp_path / "stderr").read_text()
    assert wait_for(lambda: not any(child.is_running() and child.status() != "zombie" for child in started), 15)
    said = (tmp_path / "stderr").read_text()
    assert f"resume with: milepost resume stopped --root {tmp_path}" in said and "Traceback" not in said
    steps = manifest.finished_steps(folder)
    assert steps == list(range(len(steps)))
    assert not list(Path(folder.uri).rglob("*.tmp"))


CONNECTING = """
import signal, sys, time
from milepost.engines import cluster

def leave(number, frame):
    raise SystemExit(7)

signal.signal(signal.SIGTERM, leave)
print("connecting", flush=True)
cluster.connect(num_cpus=1)
time.sleep(60)
"""


@pytest.mark.parametrize("delay", [0.1, 1.0, 2.0, 3.0])
def test_a_signal_that_comes_while_ray_starts_is_not_lost(delay: float) -> None:
    process = subprocess.Popen([sys.executable, "-c", CONNECTING], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None and process.stdout.readline() == b"connecting\n"
    time.sleep(delay)
    process.terminate()
    try:
        assert process.wait(30) == 7
    finally:
        process.kill()
