"""A pool of graders on Ray: order, deadlines and deaths."""

import asyncio
import os
import signal
import threading
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from milepost.engines.grader_process import Answer, Call, GraderProcess
from milepost.engines.graders import GraderPool
from milepost.tasks.grading import grade_rows
from milepost.tasks.reward_choice import single
from milepost.tasks.rewards import grader_id

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pool(ray_cluster: None) -> Iterator[GraderPool]:
    pool = GraderPool.start(f"test-{uuid.uuid4().hex[:8]}", workers=2)
    yield pool
    pool.close()


@pytest.fixture
def process() -> Iterator[GraderProcess]:
    process = GraderProcess(memory_bytes=1024**3)
    yield process
    process.close()


def ask(pool: GraderPool, function: str, items: list[list[Any]], *, timeout_seconds: float = 30.0) -> list[Answer]:
    return asyncio.run(pool.map(function, items, timeout_seconds=timeout_seconds))


def test_answers_come_in_the_order_of_the_items(pool: GraderPool) -> None:
    answers = ask(pool, "operator:mul", [[2, index] for index in range(500)])
    assert [answer.value for answer in answers] == [2 * index for index in range(500)]
    assert ask(pool, "operator:mul", []) == []


def test_a_call_that_hangs_or_dies_costs_only_itself(pool: GraderPool) -> None:
    items = [[0], [0], [60], [0], ["x"], [0]]
    reasons = [answer.reason for answer in ask(pool, "time:sleep", items, timeout_seconds=0.5)]
    assert reasons[2] == "timeout"
    assert str(reasons[4]).startswith("error: TypeError: ")
    assert [reasons[index] for index in (0, 1, 3, 5)] == [None] * 4
    assert [answer.reason for answer in ask(pool, "os:abort", [[], []])] == ["crash", "crash"]


def test_an_actor_that_is_killed_comes_back_and_nothing_is_lost(pool: GraderPool) -> None:
    async def scenario() -> list[Answer]:
        [actor, *_] = await pool.map("os:getppid", [[]], timeout_seconds=30)
        running = asyncio.create_task(pool.map("time:sleep", [[0.05]] * 40, timeout_seconds=30))
        await asyncio.sleep(0.5)
        os.kill(actor.value, signal.SIGKILL)
        return await running

    assert [answer.reason for answer in asyncio.run(scenario())] == [None] * 40


def test_a_pool_is_found_by_name(pool: GraderPool) -> None:
    assert ask(GraderPool.connect(pool.run, workers=2), "operator:add", [[1, 2]])[0].value == 3
    with pytest.raises(LookupError, match="no engine called 'elsewhere/grader-0' is running"):
        GraderPool.connect("elsewhere", workers=1)


def test_rows_get_verdicts_from_a_pool(pool: GraderPool) -> None:
    rows = [{"response": r"\boxed{\frac12}", "label": "0.5"}, {"response": "5", "label": None}]
    right, unscorable = asyncio.run(grade_rows(pool, single("math", {}), rows, timeout_seconds=30))
    assert (right.score, right.grader) == (1.0, grader_id("math"))
    assert unscorable.score is None and unscorable.reason.startswith("label None is not an answer")


def test_the_deadline_holds_against_code_that_never_yields(process: GraderProcess) -> None:
    assert process.ask(Call("operator:pow", (9**9, 9**9)), timeout_seconds=0.3).reason == "timeout"
    assert process.ask(Call("operator:add", (1, 2)), timeout_seconds=30).value == 3


def test_a_lot_of_calls_has_an_answer_for_each_whatever_they_do(process: GraderProcess) -> None:
    lot = [
        Call("operator:mul", (2, 3)),
        Call("time:sleep", (60,)),
        Call("operator:add", (1, 2)),
        Call("os:abort"),
        Call("builtins:len", ({1},)),
        Call("builtins:int", ("x",)),
        Call("operator:sub", (1, 2)),
    ]
    answers = process.ask_all(lot, timeout_seconds=0.5)
    assert [answer.value for answer in answers] == [6, None, 3, None, None, None, -1]
    reasons = [(answer.reason or "").partition(":")[0] for answer in answers]
    assert reasons == ["", "timeout", "", "crash", "error", "error", ""]
    assert process.answered == 4


def test_a_call_that_was_interrupted_leaves_no_answer_to_the_next(process: GraderProcess) -> None:
    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR2, interrupt)
    try:
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGUSR2)).start()
        with pytest.raises(KeyboardInterrupt):
            process.ask(Call("time:sleep", (2,)), timeout_seconds=30)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert process.ask(Call("operator:add", (1, 2)), timeout_seconds=30).value == 3


def test_memory_is_bounded(process: GraderProcess) -> None:
    answer = process.ask(Call("operator:mul", ("x", 2 * 1024**3)), timeout_seconds=30)
    assert answer.reason == "error: MemoryError: "


def test_a_process_that_was_killed_from_outside_is_asked_again(process: GraderProcess) -> None:
    victim = process.ask(Call("os:getpid"), timeout_seconds=30).value
    os.kill(victim, signal.SIGKILL)
    assert process.ask(Call("operator:add", (1, 2)), timeout_seconds=30).value == 3


def test_warming_up_is_on_nobodys_clock(process: GraderProcess) -> None:
    slow = Call("time:sleep", (0.5,))
    assert process.ask(Call("operator:add", (1, 2)), timeout_seconds=0.3, warm_up=slow).value == 3
    failing = Call("os:chdir", ("/no/such/folder",))
    answer = process.ask(Call("operator:add", (1, 2)), timeout_seconds=30, warm_up=failing)
    assert str(answer.reason).startswith("error: FileNotFoundError")


def test_arguments_that_are_not_json_are_an_error_of_their_call(process: GraderProcess) -> None:
    assert "not JSON serializable" in str(process.ask(Call("builtins:len", ({1},)), timeout_seconds=30).reason)
