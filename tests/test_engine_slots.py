"""Runs that want the same engines take turns where there is a limit, and nobody waits where there is none."""

import asyncio
import json
import os
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from milepost.flows import engine_slots as slots
from milepost.flows.engine_slots import engine_slots, wanted_slots
from milepost.flows.trainer_alone import without_rollout
from milepost.storage.parameters import EnginesSection, ModelSection, Parameters
from milepost.storage.training import PerfSection

CORES = os.cpu_count() or 1


def parameters(*, pool: str = "", train: str = "fake", rollout: str = "fake", threads: int = 0) -> Parameters:
    engines = EnginesSection.model_validate(
        {"pool": pool, "train": train, "rollout": rollout, "rollout_threads": threads, "rollout_engines": 3}
    )
    return Parameters(engines=engines, perf=PerfSection(train_threads=threads), model=ModelSection(tensor_parallel=2))


def test_a_run_wants_the_cores_of_trainer_or_engines_whichever_are_more_because_they_work_in_turn() -> None:
    assert wanted_slots(parameters(train="megatron", rollout="embedded", threads=1), gpus=False) == 3
    assert wanted_slots(parameters(train="megatron", threads=2), gpus=False) == 4
    assert wanted_slots(parameters(train="megatron"), gpus=False) == 2 * CORES
    assert wanted_slots(parameters(), gpus=False) == 1


def test_on_gpus_a_run_wants_those_that_it_reserves() -> None:
    assert wanted_slots(parameters(train="megatron"), gpus=True) == 2
    assert wanted_slots(parameters(train="megatron", rollout="sglang"), gpus=True) == 5
    assert wanted_slots(parameters(), gpus=True) == 0


def test_a_trainer_alone_wants_its_own_cores_only() -> None:
    assert wanted_slots(without_rollout(parameters(train="megatron", rollout="embedded", threads=1)), gpus=False) == 2
    assert wanted_slots(without_rollout(parameters(train="megatron", rollout="sglang")), gpus=True) == 2


@pytest.mark.slow
def test_two_runs_that_want_one_slot_take_turns(prefect_server: str) -> None:
    name, seen = f"engines-{uuid.uuid4().hex[:8]}", []
    with get_client(sync_client=True) as client:
        client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=name, limit=1))

    async def run(run: str) -> None:
        async with engine_slots(parameters(pool=name, train="megatron")):  # wants more than there are, and gets all
            seen.append(run)
            await asyncio.sleep(1)
            seen.append(run)

    async def both() -> None:
        await asyncio.wait_for(asyncio.gather(run("a"), run("b")), 90)

    asyncio.run(both())
    assert seen in (["a", "a", "b", "b"], ["b", "b", "a", "a"])
    with get_client(sync_client=True) as client:
        assert client.read_global_concurrency_limit_by_name(name).active_slots == 0


@contextmanager
def answering(*answers: tuple[int, dict[str, Any]]) -> Iterator[list[str]]:
    """A Prefect server with these answers, one after the other; the last one is for everything after it as well."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("content-length") or 0))
            what = self.path.partition("?")[0].removesuffix("/renew").rpartition("/")[2]
            status, content = 422, {"detail": "CSRF protection is disabled."}
            if what != "csrf-token":
                asked.append(what)
                status, content = answers[min(len(asked), len(answers)) - 1]
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.send_header("retry-after", "0")
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = answer

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/api"
        with temporary_settings({PREFECT_API_URL: url, PREFECT_CLIENT_MAX_RETRIES: 0}):
            yield asked
        server.shutdown()


async def worked(chosen: Parameters) -> None:
    async with engine_slots(chosen):
        """Nothing."""


def test_a_run_keeps_waiting_for_its_turn_while_prefect_is_busy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(slots, "ASK_SECONDS", 0.01)
    limit = {"id": str(uuid.uuid4()), "name": "engines", "limit": 1, "active_slots": 1}
    lease = {"lease_id": str(uuid.uuid4()), "limits": []}
    with answering((500, {}), (200, limit), (503, {}), (423, {}), (500, {}), (200, lease)) as asked:
        asyncio.run(worked(parameters(pool="engines", train="megatron")))
    assert asked[:6] == ["engines", "engines", *["increment-with-lease"] * 4] and asked[-1] == "decrement-with-lease"
    assert "waits until it says whose turn it is" in capsys.readouterr().err


def test_a_run_goes_on_without_its_turn_and_says_so_when_prefect_is_gone_for_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(slots, "ASK_SECONDS", 0.01)
    monkeypatch.setattr(slots, "PATIENCE_SECONDS", 0.1)
    with answering((500, {})):
        asyncio.run(worked(parameters(pool="engines", train="megatron")))
    assert "this run goes on and takes no slots" in capsys.readouterr().err


def test_slots_that_expired_while_prefect_was_away_are_taken_again() -> None:
    held, again = slots._Held("engines", 1, uuid.uuid4()), uuid.uuid4()
    with answering((410, {}), (200, {"lease_id": str(again), "limits": []})):
        held.renew()
    assert held.lease == again


@pytest.mark.slow
def test_nobody_waits_for_a_limit_that_is_not_there(prefect_server: str) -> None:
    async def run() -> None:
        async with engine_slots(parameters(pool="nothing-of-this-name")):
            pass

    asyncio.run(asyncio.wait_for(run(), 30))
