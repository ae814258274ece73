"""Records in the outbox: in order, none lost, and none sent twice unless the process died in between."""

import json
import math
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from milepost.storage import files
from milepost.storage.lineage_records import step_record
from milepost.storage.outbox import Courier, DeliveryFailed, Outbox, Record, RecordRefused, deliver


class Receiver:
    """Takes records into a list; `failures` are raised first, one for each attempt."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.taken: list[str] = []
        self.attempted = threading.Event()

    def __call__(self, record: Record) -> None:
        self.attempted.set()
        if self.failures:
            raise self.failures.pop(0)
        self.taken.append(record["id"])


def filled(uri: str, *names: str) -> Outbox:
    outbox = Outbox(uri)
    for name in names:
        outbox.append({"id": name, "kind": "step"})
    return outbox


def test_records_arrive_in_the_order_they_were_appended(tmp_path: Path) -> None:
    names = [f"step-{number}" for number in range(12)]
    receiver = Receiver()
    delivery = deliver(filled(str(tmp_path), *names), receiver)
    assert receiver.taken == names
    assert (delivery.sent, delivery.waiting, delivery.error) == (12, 0, "")


def test_a_failure_stops_the_delivery_and_loses_nothing(tmp_path: Path) -> None:
    outbox = filled(str(tmp_path), "a", "b")
    receiver = Receiver(DeliveryFailed("the server is down"))
    assert deliver(outbox, receiver).error == "the server is down"
    assert deliver(outbox, receiver).sent == 2
    assert receiver.taken == ["a", "b"]


def test_another_process_delivers_what_is_left_and_nothing_twice(tmp_path: Path) -> None:
    receiver = Receiver()
    deliver(filled(str(tmp_path), "a"), receiver)
    later = Outbox(str(tmp_path))
    later.append({"id": "b", "kind": "step"})
    deliver(later, receiver)
    assert receiver.taken == ["a", "b"]


def test_a_record_of_the_same_id_is_kept_once_even_after_a_restart(tmp_path: Path) -> None:
    assert filled(str(tmp_path), "a").append({"id": "a", "kind": "again"}) is False
    assert Outbox(str(tmp_path)).append({"id": "a", "kind": "again"}) is False
    assert len(Outbox(str(tmp_path)).records()) == 1


def test_a_refused_record_lets_the_next_ones_pass(tmp_path: Path) -> None:
    outbox = filled(str(tmp_path), "bad", "good")
    receiver = Receiver(RecordRefused("no such kind"))
    delivery = deliver(outbox, receiver)
    assert delivery.refused == ("00000001-bad.json: no such kind",)
    assert receiver.taken == ["good"] and outbox.waiting("mlflow") == []


def test_a_damaged_file_does_not_stop_the_others(tmp_path: Path) -> None:
    outbox = filled(str(tmp_path), "a", "b")
    (tmp_path / "00000001-a.json").write_text('{"id": "a"')
    receiver = Receiver()
    assert "is not JSON" in deliver(outbox, receiver).refused[0]
    assert receiver.taken == ["b"]


def test_each_target_has_its_own_progress(tmp_path: Path) -> None:
    outbox = filled(str(tmp_path), "a")
    first, second = Receiver(), Receiver()
    deliver(outbox, first, target="sqlite:///one")
    deliver(outbox, second, target="http://two")
    assert first.taken == second.taken == ["a"]


def test_every_record_carries_an_identity_that_no_other_outbox_shares(tmp_path: Path) -> None:
    one, two = filled(str(tmp_path / "one"), "a"), filled(str(tmp_path / "two"), "a")
    uids = [outbox.read(outbox.records()[0])["uid"] for outbox in (one, two)]
    assert uids[0] != uids[1] and all(uid.endswith("/a") for uid in uids)
    assert Outbox(one.uri).uid == one.uid


def test_an_outbox_works_on_any_filesystem() -> None:
    receiver = Receiver()
    deliver(filled("memory://outbox-test/run", "a", "b"), receiver)
    assert receiver.taken == ["a", "b"]
    files.remove_folder("memory://outbox-test")


@pytest.mark.parametrize("name", ["", "a/b", "a b", "../a"])
def test_an_id_that_cannot_name_a_file_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="cannot name a file"):
        Outbox(str(tmp_path)).append({"id": name})


def test_threads_that_append_at_once_lose_no_record(tmp_path: Path) -> None:
    outbox = Outbox(str(tmp_path))
    threads = [
        threading.Thread(target=lambda base=base: [outbox.append({"id": f"{base}-{n}"}) for n in range(10)])
        for base in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outbox.records()) == 40


def test_a_courier_delivers_everything_before_it_stops(tmp_path: Path) -> None:
    receiver = Receiver()
    courier = Courier(Outbox(str(tmp_path)), receiver)
    courier.start()
    for number in range(5):
        courier.post({"id": f"step-{number}"})
    assert courier.stop().waiting == 0
    assert receiver.taken == [f"step-{number}" for number in range(5)]


def test_a_courier_tries_again_until_the_receiver_is_back(tmp_path: Path) -> None:
    receiver = Receiver(DeliveryFailed("down"), DeliveryFailed("down"))
    courier = Courier(filled(str(tmp_path), "a"), receiver, retry_seconds=0.01)
    courier.start()
    courier.post({"id": "b"})
    courier.stop()
    courier_again = Courier(Outbox(str(tmp_path)), receiver, retry_seconds=0.01)
    courier_again.start()
    assert courier_again.stop().waiting == 0
    assert receiver.taken == ["a", "b"]


def test_a_courier_whose_receiver_hangs_gives_up_and_keeps_the_record(tmp_path: Path) -> None:
    release = threading.Event()
    courier = Courier(filled(str(tmp_path), "a"), lambda record: release.wait(60) and None)
    courier.start()
    delivery = courier.stop(timeout_seconds=0.1)
    release.set()
    assert delivery.waiting == 1 and "within 0.1 s" in delivery.error


def test_a_receiver_that_is_down_is_named_when_the_courier_stops(tmp_path: Path) -> None:
    receiver = Receiver(*[DeliveryFailed("nothing listens")] * 9)
    courier = Courier(filled(str(tmp_path), "a"), receiver)
    courier.start()
    receiver.attempted.wait(10)
    delivery = courier.stop()
    assert (delivery.waiting, delivery.error) == (1, "nothing listens")


@given(st.dictionaries(st.text(), st.floats(), max_size=8))
def test_a_step_record_is_json_whatever_its_metrics_are(metrics: dict[str, float]) -> None:
    record: dict[str, Any] = step_record("run", 1, metrics=metrics, tables={}, tags={})
    again = json.loads(json.dumps(record, allow_nan=False))
    assert again["metrics"] == {name: value for name, value in metrics.items() if math.isfinite(value)}
    assert set(again["nonfinite"]) == set(metrics) - set(again["metrics"])
