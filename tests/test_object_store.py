"""Everything a run stores, on an S3 server over HTTP: what others publish is seen, and a kill tears nothing."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import botocore.session
import pytest
from botocore.exceptions import ClientError
from moto.server import ThreadedMotoServer
from s3fs import S3FileSystem

from milepost.storage import checkpoints, files, manifest, retention, runs
from milepost.storage.journal import JournalConflict, Slot, StepStore
from milepost.storage.lease import LeaseHeld, LeaseLost, hold
from milepost.storage.manifest import StepManifest
from milepost.storage.runs import RunFolder
from milepost.storage.schema import PROMPTS, ROLLOUTS, from_rows
from milepost.storage.tables import DamagedTable, read_table, write_table

from .test_checkpoints import publish as publish_checkpoint
from .test_runs import record
from .test_tables import rollout

pytestmark = pytest.mark.slow

SLOT = Slot("generate", 0, 0)

KILLED_BEFORE_ITS_COMMIT = """
import os, signal, sys
from milepost.storage import runs
from milepost.storage.journal import StepStore
from milepost.storage.lease import hold
from milepost.storage.schema import ROLLOUTS, from_rows
from tests.test_tables import rollout

folder = runs.run_folder(sys.argv[1], "first")
with hold(folder) as lease:
    StepStore(folder.step(0), "first", 0, lease.fence).write("generated", from_rows([rollout("a")], ROLLOUTS), ROLLOUTS)
    os.kill(os.getpid(), signal.SIGKILL)
"""

KILLED_BEFORE_ITS_MANIFEST = """
import os, signal, sys
from milepost.storage import files, runs
from tests.test_checkpoints import publish

folder = runs.run_folder(sys.argv[1], "first")
publish(folder, 1)
files.publish_json = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
publish(folder, 2)
"""


@contextlib.contextmanager
def s3_server() -> Iterator[str]:
    """The address of an S3 server; the environment names it, so that plain s3:// URIs go there."""
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "key")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        client().create_bucket(Bucket="runs")
        S3FileSystem.clear_instance_cache()  # one that was made before knows another address
        yield f"http://{host}:{port}"
    moto.stop()


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with s3_server() as address:
        yield address


@pytest.fixture
def root(server: str, tmp_path: Path) -> str:
    return f"s3://runs/{tmp_path.name}"


@pytest.fixture
def folder(root: str) -> RunFolder:
    return runs.run_folder(root, "first")


def client() -> Any:
    """A client of its own: what it writes is another process' work to the code under test."""
    return botocore.session.get_session().create_client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"])


def put_by_another(uri: str, data: bytes) -> None:
    bucket, key = uri.removeprefix("s3://").split("/", 1)
    client().put_object(Bucket=bucket, Key=key, Body=data)


def test_a_file_is_published_once_and_replaced_only_on_request(root: str) -> None:
    uri = files.join(root, "a", "b")
    files.publish(uri, b"first")
    with pytest.raises(files.AlreadyPublished, match="a/b"):
        files.publish(uri, b"second")
    assert files.read(uri) == b"first"
    files.publish(uri, b"third", overwrite=True)
    assert files.read(uri) == b"third"


def test_what_another_process_publishes_is_seen_at_once(root: str) -> None:
    files.publish(files.join(root, "x", "1"), b"")
    assert files.names(files.join(root, "x")) == ["1"]
    put_by_another(files.join(root, "x", "2"), b"two")
    assert files.exists(files.join(root, "x", "2"))
    assert files.names(files.join(root, "x")) == ["1", "2"]
    assert files.read(files.join(root, "x", "2")) == b"two"


def test_a_folder_that_is_not_there_is_empty_and_a_file_that_is_not_there_is_missing(root: str) -> None:
    assert files.names(files.join(root, "nothing")) == []
    assert not files.exists(files.join(root, "nothing"))
    with pytest.raises(FileNotFoundError):
        files.read(files.join(root, "nothing"))


def test_a_removed_folder_is_gone(root: str) -> None:
    files.publish(files.join(root, "x", "1"), b"")
    files.remove_folder(files.join(root, "x"))
    assert files.names(files.join(root, "x")) == []


def test_exactly_one_of_many_publishers_wins(root: str) -> None:
    uri, won = files.join(root, "race"), []

    def publish(number: int) -> None:
        try:
            files.publish(uri, str(number).encode())
        except files.AlreadyPublished:
            return
        won.append(number)

    threads = [threading.Thread(target=publish, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [str(number).encode() for number in won] == [files.read(uri)]


def test_a_table_of_many_parts_is_published_once_too(root: str) -> None:
    data = os.urandom(2**20) * 101
    files.publish(files.join(root, "large"), data)
    with pytest.raises(files.AlreadyPublished, match="large"):
        files.publish(files.join(root, "large"), data[:-1])
    assert files.digest_of(files.read(files.join(root, "large"))) == files.digest_of(data)


def refuse(uri: str, monkeypatch: pytest.MonkeyPatch, *, code: str, times: int) -> None:
    """The store answers the next requests to write with `code`, and says no more than that."""
    fs = files.filesystem(uri)[0]
    put, answers = fs.pipe_file, iter([ClientError({"Error": {"Code": code}}, "PutObject")] * times)

    def pipe_file(path: str, data: bytes, mode: str) -> None:
        for answer in answers:
            raise OSError(5, "refused") from answer
        put(path, data, mode=mode)

    monkeypatch.setattr(fs, "pipe_file", pipe_file)


def test_a_store_that_names_no_condition_still_says_who_was_first(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(root, monkeypatch, code="PreconditionFailed", times=1)
    with pytest.raises(files.AlreadyPublished, match="x"):
        files.publish(files.join(root, "x"), b"data")


def test_a_publisher_that_met_another_one_tries_again(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(root, monkeypatch, code="ConditionalRequestConflict", times=2)
    files.publish(files.join(root, "x"), b"data")
    assert files.read(files.join(root, "x")) == b"data"


def test_any_other_refusal_is_an_error(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(root, monkeypatch, code="SlowDown", times=1)
    with pytest.raises(OSError, match="refused"):
        files.publish(files.join(root, "x"), b"data")


def test_a_table_comes_back_and_a_damaged_one_is_refused(root: str) -> None:
    table = from_rows([rollout("a"), rollout("b")], ROLLOUTS)
    ref = write_table(files.join(root, "t"), table, ROLLOUTS)
    assert write_table(files.join(root, "t"), table, ROLLOUTS) == ref
    assert read_table(ref).equals(table)
    put_by_another(ref.uri, files.read(ref.uri)[:-1] + b"?")
    with pytest.raises(DamagedTable, match="was written"):
        read_table(ref)


def test_a_run_record_comes_back_and_its_name_is_taken(folder: RunFolder) -> None:
    runs.require_new(folder)
    runs.create(folder, record())
    assert runs.load(folder) == record()
    with pytest.raises(runs.RunExists, match="'first' already exists at s3://"):
        runs.create(folder, record())
    with pytest.raises(runs.RunExists, match="choose another name"):
        runs.require_new(folder)


def test_the_journal_and_the_chain_of_manifests_stand(folder: RunFolder) -> None:
    for step in range(2):
        store = StepStore(folder.step(step), "first", step)
        ref = store.write("prompts", PROMPTS.empty_table(), PROMPTS)
        written = store.commit(SLOT, "k" * 64, {"prompts": ref}, started=0.0)
        assert store.committed(SLOT, "k" * 64) == written and store.commits() == [written]
        with pytest.raises(JournalConflict, match="committed under key kkkk"):
            store.commit(SLOT, "other", {}, started=0.0)
        previous, entries = manifest.manifest_digest(folder, step - 1), manifest.commit_entries([written])
        manifest.publish(folder, StepManifest("first", step, previous, "0-a", "1-b", "", {}, entries, {}, {}))
    assert manifest.finished_steps(folder) == [0, 1]
    assert manifest.load(folder, 1).previous == manifest.manifest_digest(folder, 0) != ""


def test_a_lease_keeps_others_out_and_a_newer_one_fences_the_older(folder: RunFolder) -> None:
    with hold(folder, clock=lambda: 0.0) as old:
        with pytest.raises(LeaseHeld, match="works on s3://"), hold(folder, clock=lambda: 60.0):
            pass
        with hold(folder, clock=lambda: 61.0) as new:
            with pytest.raises(LeaseLost, match="claim 1 on s3://.* is lost, claim 2 of process"):
                StepStore(folder.step(0), "first", 0, old.fence).commit(SLOT, "k", {}, started=0.0)
            assert StepStore(folder.step(0), "first", 0, new.fence).commit(SLOT, "k", {}, started=0.0).fence == 2
    with hold(folder) as third:
        assert third.fence == 3


def test_a_kill_between_a_table_and_its_commit_leaves_a_stage_to_be_run_again(root: str, folder: RunFolder) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED_BEFORE_ITS_COMMIT, root], timeout=120)
    assert killed.returncode == -signal.SIGKILL
    orphans = [name for name in files.names(folder.step(0)) if name.startswith("generated")]
    with hold(folder) as lease:
        store = StepStore(folder.step(0), "first", 0, lease.fence)
        assert (store.committed(SLOT, "k"), store.commits(), manifest.finished_steps(folder)) == (None, [], [])
        ref = store.write("generated", from_rows([rollout("a")], ROLLOUTS), ROLLOUTS)
        assert [ref.uri.rsplit("/", 1)[-1]] == orphans
        assert store.commit(SLOT, "k", {"rollouts": ref}, started=0.0).fence == 2
    assert read_table(store.committed(SLOT, "k").tables["rollouts"]).num_rows == 1


def test_a_kill_between_the_files_and_the_manifest_leaves_no_checkpoint(root: str, folder: RunFolder) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED_BEFORE_ITS_MANIFEST, root], timeout=120)
    assert killed.returncode == -signal.SIGKILL
    assert files.names(folder.checkpoint(2)) == ["ranks", "state"]
    assert checkpoints.complete(folder) == [1]
    found = checkpoints.latest(folder)
    assert found is not None and (found.uri, found.version.step) == (folder.trainer_state(1), 1)
    publish_checkpoint(folder, 2)
    assert checkpoints.complete(folder) == [1, 2]


def test_another_machine_fetches_a_checkpoint_and_only_what_it_lacks(folder: RunFolder) -> None:
    publish_checkpoint(folder, 1)
    shutil.rmtree(folder.workspace)
    assert checkpoints.latest(folder) is not None
    here = Path(folder.trainer_state(1))
    kept, lost = here / "state", here / "ranks" / "0"
    before = kept.stat().st_ino, kept.stat().st_mtime_ns
    lost.write_bytes(b"half")
    assert checkpoints.latest(folder) == checkpoints.reference(folder, 1)
    assert (kept.stat().st_ino, kept.stat().st_mtime_ns) == before
    assert checkpoints.require_complete(str(here)) == checkpoints.load_manifest(folder.checkpoint(1))


def test_a_checkpoint_that_changed_in_the_bucket_is_passed_over(
    folder: RunFolder, caplog: pytest.LogCaptureFixture
) -> None:
    publish_checkpoint(folder, 1, 2)
    uri = files.join(folder.checkpoint(2), "state")
    put_by_another(uri, files.read(uri)[:-1] + b"?")
    shutil.rmtree(folder.workspace)
    found = checkpoints.latest(folder)
    assert found is not None and found.version.step == 1
    assert "state has changed since it was saved" in caplog.text
    assert checkpoints.faults(folder.checkpoint(2)) == ["state has changed since it was saved"]


def test_retention_removes_checkpoints_from_the_bucket_and_copies_from_the_workspace(folder: RunFolder) -> None:
    publish_checkpoint(folder, 1, 2, 3)
    assert retention.retain(folder, keep_last=2) == [1]
    assert checkpoints.complete(folder) == [2, 3] and not files.exists(folder.checkpoint(1))
    assert files.names(files.join(folder.workspace, "checkpoints")) == ["000003"]


def test_a_published_checkpoint_is_not_uploaded_again(folder: RunFolder) -> None:
    publish_checkpoint(folder, 1)
    changed = Path(folder.trainer_state(1), "state")
    changed.write_bytes(b"another")
    with pytest.raises(files.AlreadyPublished, match="000001"):
        checkpoints.publish(folder, checkpoints.reference(folder, 1))
    assert checkpoints.faults(folder.checkpoint(1)) == []
