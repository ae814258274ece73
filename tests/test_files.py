"""Atomic publishing, on a local disk and in memory."""

import threading
from pathlib import Path

import pytest

from milepost.storage import files


@pytest.fixture(params=["local", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path) if request.param == "local" else f"memory://{tmp_path.name}"


def test_what_is_published_is_read_back(folder: str) -> None:
    files.publish(files.join(folder, "a", "b.bin"), b"\x00\xffdata")
    assert files.read(files.join(folder, "a", "b.bin")) == b"\x00\xffdata"


def test_a_second_publisher_is_refused_and_the_first_file_stays(folder: str) -> None:
    uri = files.join(folder, "once")
    files.publish(uri, b"first")
    with pytest.raises(files.AlreadyPublished, match="once"):
        files.publish(uri, b"second")
    assert files.read(uri) == b"first"


def test_overwriting_has_to_be_asked_for(folder: str) -> None:
    uri = files.join(folder, "latest")
    files.publish(uri, b"1", overwrite=True)
    files.publish(uri, b"2", overwrite=True)
    assert files.read(uri) == b"2"


def test_names_lists_published_files_only(folder: str) -> None:
    files.publish(files.join(folder, "x", "2.json"), b"")
    files.publish(files.join(folder, "x", "1.json"), b"")
    assert files.names(files.join(folder, "x")) == ["1.json", "2.json"]
    assert files.names(files.join(folder, "nothing")) == []


def test_a_write_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        files.publish(str(tmp_path / "x"), b"data")
    assert list(tmp_path.iterdir()) == []


def test_exactly_one_of_many_publishers_wins(tmp_path: Path) -> None:
    uri, won = str(tmp_path / "race"), []

    def publish(number: int) -> None:
        try:
            files.publish(uri, str(number).encode())
        except files.AlreadyPublished:
            return
        won.append(number)

    threads = [threading.Thread(target=publish, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [str(number).encode() for number in won] == [files.read(uri)]


def test_canonical_json_does_not_depend_on_the_order_of_keys() -> None:
    assert files.canonical_json({"b": 1, "a": [1.5, None]}) == files.canonical_json({"a": [1.5, None], "b": 1})


def test_nan_is_refused_in_stored_json(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        files.publish_json(str(tmp_path / "x.json"), {"loss": float("nan")})
