"""What processes log: a line a record in a file each, read as one stream while it grows."""

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from milepost.engines import cluster
from milepost.engines.actor_logs import logs_in
from milepost.engines.observed import Observed
from milepost.storage.process_logs import LONGEST_BYTES, Entry, Tail, log_handler, replaced
from milepost.storage.redaction import masked_text


@contextmanager
def logger(path: Path) -> Iterator[logging.Logger]:
    found, handler = logging.Logger("milepost.tests"), log_handler(str(path))
    found.addHandler(handler)
    yield found
    handler.close()


def read(folder: Path) -> list[Entry]:
    return Tail(str(folder)).read()


def test_a_record_is_read_as_it_was_logged(tmp_path: Path) -> None:
    with logger(tmp_path / "logs" / "train-0.log") as log:
        log.warning("%d of %d", 1, 2)
    (found,) = read(tmp_path / "logs")
    assert (found.level, found.process, found.logger) == (logging.WARNING, "train-0", "milepost.tests")
    assert found.message == "1 of 2" and abs(found.time - time.time()) < 60


@given(message=st.text(st.characters(exclude_characters="\n\r", exclude_categories=["Cs"])))
def test_any_line_is_read_back(message: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("any")
    with logger(folder / "router.log") as log:
        log.info("%s", message)
        log.info("next")
    assert [entry.message for entry in read(folder)] == [masked_text(message), "next"]


def test_a_file_holds_no_password(tmp_path: Path) -> None:
    with logger(tmp_path / "flow.log") as log:
        log.warning("no answer from https://user:hunter2@host/api")
    assert "hunter2" not in (tmp_path / "flow.log").read_text()


def test_a_traceback_belongs_to_its_record(tmp_path: Path) -> None:
    with logger(tmp_path / "train-0.log") as log:
        try:
            raise ValueError("no such weights")
        except ValueError:
            log.exception("save failed")
        log.info("next")
    failed, following = read(tmp_path)
    assert failed.message.startswith("save failed\nTraceback") and failed.message.endswith("no such weights")
    assert failed.level == logging.ERROR and following.message == "next"


def test_a_line_that_is_still_being_written_waits(tmp_path: Path) -> None:
    path, tail = tmp_path / "router.log", Tail(str(tmp_path))
    path.write_text("2026-01-01T00:00:00.000Z INFO milepost.router: worker went")
    assert tail.read() == []
    with open(path, "a") as file:
        file.write(" away\n")
    assert [entry.message for entry in tail.read()] == ["worker went away"]
    assert tail.read() == []


def test_processes_are_merged_in_order_of_time_and_what_was_there_can_be_skipped(tmp_path: Path) -> None:
    for name, second in (("a", 2), ("b", 1), ("a", 4), ("b", 3)):
        with open(tmp_path / f"{name}.log", "a") as file:
            file.write(f"2026-01-01T00:00:0{second}.000Z INFO milepost.x: {second}\n")
    assert [entry.message for entry in read(tmp_path)] == ["1", "2", "3", "4"]
    tail = Tail(str(tmp_path))
    tail.skip()
    (tmp_path / "c.log").write_text("2026-01-01T00:00:09.000Z INFO milepost.x: new\n")
    assert [entry.message for entry in tail.read()] == ["new"]


def test_the_lines_of_an_sglang_server_are_as_bad_as_their_words(tmp_path: Path) -> None:
    (tmp_path / "rollout-0-sglang.log").write_text(
        "INFO:     127.0.0.1:1 - GET /health 200 OK\n"
        "[2026-01-01 00:00:00 TP0] Decode batch, #running-req: 3\n"
        "[2026-01-01 00:00:01 TP0] Warning: the cache is small\n"
        "[2026-01-01 00:00:02 TP0] Scheduler hit an exception: Traceback (most recent call last):\n"
        '  File "scheduler.py", line 1, in run\n'
        "torch.OutOfMemoryError: CUDA out of memory\n"
    )
    found = {entry.message.split("\n")[0][:14]: entry.level for entry in read(tmp_path)}
    assert [found[key] for key in ("INFO:     127.", "Decode batch, ")] == [logging.INFO, logging.INFO]
    assert found["Warning: the c"] == logging.WARNING
    assert [found[key] for key in ("Scheduler hit ", "torch.OutOfMem")] == [logging.ERROR, logging.ERROR]


def test_a_file_that_is_begun_again_is_read_from_its_beginning(tmp_path: Path) -> None:
    path, tail = tmp_path / "rollout-0-sglang.log", Tail(str(tmp_path))
    path.write_text("[2026-01-01 00:00:00] the first server\n")
    tail.read()
    os.replace(path, path.with_suffix(".log.1"))
    path.write_text("[2026-01-01 00:01:00] second\n")
    assert [entry.message for entry in tail.read()] == ["second"]
    (before,) = replaced(str(tmp_path))
    assert (before.process, before.message) == ("rollout-0-sglang", "the first server")


def test_a_file_does_not_grow_for_ever(tmp_path: Path) -> None:
    with logger(tmp_path / "router.log") as log:
        for _ in range(3):
            log.info("x" * (LONGEST_BYTES // 2))
    assert (tmp_path / "router.log").stat().st_size <= LONGEST_BYTES


class Talks(Observed):
    def die(self) -> None:
        logging.getLogger("milepost.tests").info("about to end")
        os._exit(1)


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_an_actor_that_dies_leaves_its_last_words(tmp_path: Path) -> None:
    with logs_in(str(tmp_path)):
        actor = cluster.start_actor(Talks, "logs/talks-0")
    with pytest.raises(cluster.EngineDied):
        cluster.wait(actor.die.remote(), 60, what="its end")
    assert [(entry.process, entry.message) for entry in read(tmp_path)] == [("talks-0", "about to end")]
