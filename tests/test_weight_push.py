"""Weights sent into running engines: all of them or none that count, and a failure is named and left behind."""

import contextlib
import threading
import time
import uuid
import weakref
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file

from milepost.engines.digest import weights_digest
from milepost.engines.protocols import PushReport, WeightVersion
from milepost.engines.rollout_actor import start_rollout_engine
from milepost.engines.served_engine import EmbeddedEngine
from milepost.engines.weight_carriers import Carrier, open_carrier
from milepost.engines.weight_push import push_tensors
from milepost.engines.weight_targets import IN_FLIGHT
from milepost.storage.parameters import SyncSection

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

TRANSPORTS = ("tensor", "distributed")
Tensors = dict[str, torch.Tensor]


class Engine:
    """A running embedded engine, in a process of its own."""

    def __init__(self, index: int, model_dir: str) -> None:
        run = f"push-{uuid.uuid4().hex[:8]}"
        options = {"model_dir": model_dir, "context_length": 64, "max_running_requests": 4, "threads": 1}
        self.actor = start_rollout_engine(run, index, engine_class=EmbeddedEngine, timeout_seconds=120, **options)
        self.url = self.actor.url()

    def label(self) -> str:
        return str(httpx.get(f"{self.url}/model_info").json()["weight_version"])

    def logprobs(self) -> list[float]:
        """Of a greedy completion, which tell weights apart."""
        sampling = {"temperature": 0.0, "max_new_tokens": 4, "ignore_eos": True}
        body = {"input_ids": [1, 2, 3], "sampling_params": sampling, "return_logprob": True}
        meta = httpx.post(f"{self.url}/generate", json=body, timeout=60).json()["meta_info"]
        return [value for value, *_ in meta["output_token_logprobs"]]


@pytest.fixture(scope="module")
def engines(model_dir: str, ray_cluster: None) -> Iterator[list[Engine]]:
    started = [Engine(index, model_dir) for index in range(2)]
    yield started
    for engine in started:
        engine.actor.close()


@pytest.fixture(params=TRANSPORTS)
def carrier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Carrier]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    carrier = open_carrier(request.param)
    yield carrier
    carrier.close()


@pytest.fixture
def broadcast(monkeypatch: pytest.MonkeyPatch) -> Iterator[Carrier]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    carrier = open_carrier("distributed")
    yield carrier
    carrier.close()


@pytest.fixture
def tensors(model_dir: str, request: pytest.FixtureRequest) -> Tensors:
    """New weights, other ones for each test."""
    noise = torch.Generator().manual_seed(abs(hash(request.node.name)) % 2**31)
    read = load_file(Path(model_dir, "model.safetensors"))
    return {name: tensor + 0.1 * torch.randn(tensor.shape, generator=noise) for name, tensor in read.items()}


def pushed(tensors: Tensors, urls: list[str], carrier: Carrier, *, step: int = 1, seconds: float = 30) -> PushReport:
    version = WeightVersion(step, weights_digest(tensors.items()))
    sync = SyncSection(bucket_bytes=20_000, timeout_seconds=seconds)
    return push_tensors(tensors.items(), urls, version, names=tensors, sync=sync, carrier=carrier)


def test_every_engine_holds_what_was_pushed_push_after_push(
    engines: list[Engine], carrier: Carrier, tensors: Tensors
) -> None:
    for step in (1, 2):
        tensors = {name: tensor + 1 for name, tensor in tensors.items()}
        report = pushed(tensors, [engine.url for engine in engines], carrier, step=step)
        assert report.failed == {}
        assert report.metrics["bytes"] == sum(tensor.nbytes for tensor in tensors.values())
        assert [engine.label() for engine in engines] == [str(report.version)] * 2
        assert [engine.actor.weight_version() for engine in engines] == [report.version] * 2


def test_the_time_that_engines_take_part_in_leaves_out_what_was_done_before(
    engines: list[Engine], carrier: Carrier, tensors: Tensors
) -> None:
    def slowly() -> Iterator[tuple[str, torch.Tensor]]:
        time.sleep(0.5)
        yield from tensors.items()

    version, sync = WeightVersion(1, weights_digest(tensors.items())), SyncSection(timeout_seconds=30)
    started = time.monotonic()
    report = push_tensors(slowly(), [engines[0].url], version, names=tensors, sync=sync, carrier=carrier)
    taken = report.metrics
    assert 0.5 < taken["gather_seconds"] < time.monotonic() - started - taken["transfer_seconds"]
    parts = taken["begin_seconds"] + taken["send_seconds"] + taken["check_seconds"]
    assert taken["transfer_seconds"] == pytest.approx(parts)


def test_only_a_few_buckets_are_alive_at_a_time(engines: list[Engine], carrier: Carrier, tensors: Tensors) -> None:
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    peak = 0

    def counted() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal peak
        for name, tensor in tensors.items():
            copied = tensor.clone()
            alive.add(copied)
            peak = max(peak, sum(one.nbytes for one in alive))
            yield name, copied
            del copied

    version = WeightVersion(1, weights_digest(tensors.items()))
    sync = SyncSection(bucket_bytes=20_000, timeout_seconds=30)
    report = push_tensors(counted(), [engines[0].url], version, names=tensors, sync=sync, carrier=carrier)
    largest = max(tensor.nbytes for tensor in tensors.values())
    assert report.failed == {} and peak <= 20_000 + largest < report.metrics["bytes"] / 2


def test_an_engine_that_lacks_a_tensor_keeps_its_weights_and_a_label_that_is_no_version(
    engines: list[Engine], carrier: Carrier, tensors: Tensors
) -> None:
    before = engines[0].logprobs()
    tensors.pop("model.norm.weight")
    report = pushed(tensors, [engines[0].url], carrier)
    assert "missing ['model.norm.weight']" in report.failed[engines[0].url]
    assert engines[0].logprobs() == before and engines[0].actor.weight_version() is None
    with pytest.raises(ValueError, match="is not a weight version"):
        WeightVersion.parse(engines[0].label())


class FaultyEngine(ThreadingHTTPServer):
    """Answers SGLang's endpoints, but for one that it refuses, sleeps on, or takes without doing anything."""

    def __init__(self, path: str, fault: str) -> None:
        self.fault_at, self.fault, self.asked = path, fault, []  # type: ignore[var-annotated]
        self.released = threading.Event()
        super().__init__(("127.0.0.1", 0), _Faulty)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Faulty(BaseHTTPRequestHandler):
    server: Any

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.asked.append(self.path)
        fault = self.server.fault if self.path == self.server.fault_at else ""
        if fault == "sleeps":
            self.server.released.wait(60)
        body = b'{"success": false, "message": "out of memory"}' if fault == "refuses" else b"{}"
        with contextlib.suppress(BrokenPipeError):  # who asked has gone
            self.send_response(500 if fault == "refuses" else 200)
            self.end_headers()
            self.wfile.write(body)

    do_GET = do_POST

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def faulty(request: pytest.FixtureRequest) -> Iterator[FaultyEngine]:
    server = FaultyEngine(*request.param)
    yield server
    server.released.set()
    server.shutdown()
    server.server_close()


JOIN = "/init_weights_update_group"


@pytest.mark.parametrize("faulty", [(JOIN, "refuses"), (JOIN, "sleeps"), (JOIN, "takes")], indirect=True)
def test_an_engine_that_does_not_join_is_named_before_any_is_paused_and_the_next_push_works(
    engines: list[Engine], broadcast: Carrier, tensors: Tensors, faulty: FaultyEngine
) -> None:
    label, begun = engines[0].label(), time.monotonic()
    report = pushed(tensors, [engines[0].url, faulty.url], broadcast, seconds=4)
    assert report.failed.keys() == {engines[0].url, faulty.url} and time.monotonic() - begun < 20
    assert engines[0].label() == label
    if faulty.fault == "refuses":
        assert report.failed[faulty.url] == f"{faulty.url} refused {JOIN} (500): out of memory"
    if faulty.fault == "sleeps":
        assert faulty.url in report.failed[faulty.url] and JOIN in report.failed[faulty.url]
    again = pushed(tensors, [engines[0].url], broadcast)
    assert again.failed == {} and engines[0].actor.weight_version() == again.version


def test_an_engine_that_refuses_a_bucket_ends_a_broadcast_for_all_and_the_next_push_works(
    engines: list[Engine], broadcast: Carrier, tensors: Tensors
) -> None:
    first, second = (engine.url for engine in engines)

    def closing() -> Iterator[tuple[str, torch.Tensor]]:
        for number, item in enumerate(tensors.items()):
            if number == len(tensors) - 1:
                httpx.post(f"{second}/update_weight_version", json={"new_version": "1-abc"})
                httpx.post(f"{second}/end_weight_update")
            yield item

    version = WeightVersion(1, weights_digest(tensors.items()))
    sync = SyncSection(bucket_bytes=20_000, timeout_seconds=30)
    report = push_tensors(closing(), [first, second], version, names=tensors, sync=sync, carrier=broadcast)
    assert report.failed[second].endswith("(400): no weight update is open: begin one first")
    assert report.failed[first].startswith(f"the broadcast to {first} was given up: {second} refused")
    again = pushed(tensors, [first, second], broadcast)
    assert again.failed == {} and [engine.actor.weight_version() for engine in engines] == [again.version] * 2


@pytest.mark.parametrize("faulty", [("/update_weights_from_tensor", "sleeps")], indirect=True)
def test_an_engine_that_sleeps_is_left_behind_and_the_others_get_the_weights(
    engines: list[Engine], tensors: Tensors, faulty: FaultyEngine
) -> None:
    report = pushed(tensors, [engines[0].url, faulty.url], open_carrier("tensor"), seconds=5)
    late = f"{faulty.url} did not answer /update_weights_from_tensor before the deadline"
    assert report.failed == {faulty.url: late}
    assert engines[0].actor.weight_version() == report.version


@pytest.mark.parametrize("faulty", [("/server_info", "sleeps")], indirect=True)
def test_an_engine_that_is_silent_from_the_start_leaves_the_others_their_whole_time(
    engines: list[Engine], tensors: Tensors, faulty: FaultyEngine
) -> None:
    report = pushed(tensors, [engines[0].url, faulty.url], open_carrier("tensor"), seconds=5)
    assert report.failed == {faulty.url: f"{faulty.url} did not answer /server_info before the deadline"}
    assert engines[0].actor.weight_version() == report.version


@pytest.mark.parametrize("faulty", [("/update_weights_from_tensor", "refuses")], indirect=True)
def test_an_engine_that_refuses_a_bucket_is_asked_for_no_more_than_is_on_its_way(
    engines: list[Engine], tensors: Tensors, faulty: FaultyEngine
) -> None:
    report = pushed(tensors, [engines[0].url, faulty.url], open_carrier("tensor"))
    refused = "refused /update_weights_from_tensor (500): out of memory"
    assert report.failed == {faulty.url: f"{faulty.url} {refused}"}
    assert faulty.asked.count("/update_weights_from_tensor") == IN_FLIGHT
    assert engines[0].actor.weight_version() == report.version


@pytest.mark.parametrize("faulty", [("/weights_checker", "takes")], indirect=True)
def test_an_engine_that_cannot_say_what_it_loaded_has_not_loaded_it(tensors: Tensors, faulty: FaultyEngine) -> None:
    report = pushed(tensors, [faulty.url], open_carrier("tensor"))
    assert "the checksums of 0 of its 1 ranks" in report.failed[faulty.url]


def test_a_trainer_reads_its_tensors_to_the_end_even_if_no_engine_takes_them(tensors: Tensors) -> None:
    left = iter(tensors.items())
    version = WeightVersion(1, weights_digest(tensors.items()))
    sync = SyncSection(bucket_bytes=20_000, timeout_seconds=3)
    url = "http://127.0.0.1:9"
    report = push_tensors(left, [url], version, names=tensors, sync=sync, carrier=open_carrier("tensor"))
    assert next(left, None) is None and "Connection refused" in report.failed[url]
