"""A whole run on an S3 server: killed at bad moments and resumed, it ends as an undisturbed run on local files."""

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from milepost.flows.sql import as_rows, query
from milepost.storage import checkpoints, files, runs
from milepost.storage.runs import RunFolder
from milepost.storage.verify import verify
from tests.chaos.harness import RUN, Case, compare, finish, last_words, settings_of, started, wait_until
from tests.test_object_store import s3_server

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect_server")]

FAKE = ["engines.train=fake", "engines.rollout=fake"]


@dataclass(frozen=True)
class Stored(Case):
    """A run in a bucket; `root` has only its log."""

    bucket: str

    @property
    def folder(self) -> RunFolder:
        return runs.run_folder(self.bucket, RUN)

    def command(self) -> list[str]:
        words = super().command()
        return [self.bucket if word == str(self.root) else word for word in words]


@pytest.fixture(scope="module", autouse=True)
def server() -> Iterator[None]:
    with s3_server():
        yield


@pytest.fixture
def prompts() -> str:
    """A prompt set in the bucket."""
    uri = "s3://runs/data/prompts.jsonl"
    rows = [{"prompt": f"{number}+1=", "label": str(number + 1)} for number in range(6)]
    files.publish(uri, "".join(json.dumps(row) + "\n" for row in rows).encode(), overwrite=True)
    return uri


def cases(place: Path, settings: list[str], *, steps: int) -> tuple[Case, Stored]:
    """The same run on local files, undisturbed to its end, and in the bucket, not yet begun."""
    for name in ("calm", "stored"):
        (place / name).mkdir()
    calm = Case(place / "calm", settings, steps)
    finish(calm)
    return calm, Stored(place / "stored", settings, steps, f"s3://runs/{place.name}")


def kill_and_move(case: Stored, last: str) -> None:
    """SIGKILL the flow's process as soon as the file `last` is in the run, and lose what its machine had."""

    def is_there() -> bool:
        time.sleep(0.05)  # the server answers from this process, and has others to answer
        return files.exists(files.join(case.folder.uri, "steps", last))

    with started(case) as process:
        assert wait_until(is_there, process), last_words(case)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(20)
    shutil.rmtree(case.folder.workspace)


@pytest.mark.long
def test_a_killed_run_goes_on_from_the_bucket_alone(tmp_path: Path, model_dir: str, prompts: str) -> None:
    settings = settings_of(model_dir, prompts, *FAKE, "checkpoint.every_steps=2", "checkpoint.keep_last=2")
    calm, stored = cases(tmp_path, settings, steps=4)
    kill_and_move(stored, "000002/manifest.json")
    finish(stored)
    assert compare(calm, stored) == []
    assert "goes on at step 3: checkpoint 2, 2 stored batches applied again" in last_words(stored)
    found = verify(stored.folder)
    assert (found.faults, found.steps, found.checkpoints) == ([], 4, 2)
    assert checkpoints.complete(stored.folder) == [2, 4]
    assert files.names(files.join(stored.folder.workspace, "checkpoints")) == ["000004"]
    assert as_rows(query([stored.folder], "select count(*), count(distinct step) from rollouts"))[1] == [(4 * 16, 4)]
    assert b"4 of 4 steps" in files.read(stored.folder.report)
    assert os.environ["AWS_ENDPOINT_URL"].encode() not in files.read(stored.folder.record)


@pytest.mark.long
def test_real_engines_restore_what_they_uploaded(tmp_path: Path, model_dir: str, prompts: str) -> None:
    calm, stored = cases(tmp_path, settings_of(model_dir, prompts, "checkpoint.every_steps=1"), steps=2)
    kill_and_move(stored, "000000/manifest.json")
    finish(stored)
    assert "goes on at step 1: checkpoint 1, 0 stored batches" in last_words(stored)
    assert compare(calm, stored, real=True) == []
    assert verify(stored.folder).faults == []
