"""Which engine the router chooses, by policy; and that a place that becomes free goes to who has waited longest."""

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from milepost.router.asked import Asked, BadDemand, Demand, asked_of
from milepost.router.backends import Backend, BackendPool, BadWorkerUrl
from milepost.router.cache_aware import BLOCK_TOKENS, CacheAware, prompt_blocks
from milepost.router.line import Line, NobodyServes, WaitedTooLong
from milepost.router.policies import (
    ConsistentHash,
    LeastLoaded,
    LeastTokens,
    Policy,
    PowerOfTwo,
    RoundRobin,
    Sticky,
    get_policy,
)

KEYS = [f"session-{number}" for number in range(2000)]


def backends(*weights: float) -> list[Backend]:
    return [Backend(f"http://h:{number}", weight=weight) for number, weight in enumerate(weights)]


def prompt(*ids: int) -> Asked:
    return Asked(body=json.dumps({"input_ids": list(ids)}).encode())


def served(policy: Policy, candidates: Sequence[Backend], asked: Sequence[Asked]) -> list[str]:
    return [policy.choose(candidates, one).id for one in asked]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1))
def test_the_least_loaded_engine_is_chosen(loads: list[tuple[int, int]]) -> None:
    candidates = [Backend(f"http://h:{n}", in_flight=a, picked=b) for n, (a, b) in enumerate(loads)]
    chosen = LeastLoaded().choose(candidates, Asked())
    assert (chosen.in_flight, chosen.picked) == min(loads)


def test_load_counts_by_weight_and_by_tokens_where_the_policy_says_so() -> None:
    small, large = backends(1, 4)
    small.in_flight, large.in_flight, small.tokens, large.tokens = 1, 3, 10, 90
    assert LeastLoaded().choose([small, large], Asked()) is large
    assert LeastTokens().choose([small, large], Asked()) is small


def test_tokens_are_the_prompt_and_the_longest_answer_that_is_allowed() -> None:
    body = {"input_ids": [1] * 10, "sampling_params": {"max_new_tokens": 30}}
    chat = {"messages": [{"role": "user", "content": "x" * 80}], "max_tokens": 5}
    assert Asked(body=json.dumps(body).encode()).tokens == 40
    assert Asked(body=json.dumps(chat).encode()).tokens == len(json.dumps(chat["messages"])) // 4 + 5
    assert [Asked(body=text).tokens for text in (b"", b"no json", b"[1]", b'{"input_ids": "x"}')] == [0] * 4


def test_round_robin_serves_by_weight_and_lets_a_late_one_catch_nothing_up() -> None:
    policy, (one, two, late) = RoundRobin(), backends(1, 2, 1)
    assert Counter(served(policy, [one, two], [Asked()] * 30)) == {one.id: 10, two.id: 20}
    assert Counter(served(policy, [one, two, late], [Asked()] * 40))[late.id] in (10, 11)


def test_power_of_two_never_chooses_the_busiest_of_three() -> None:
    candidates = backends(1, 1, 1)
    candidates[2].in_flight = 9
    assert candidates[2].id not in served(PowerOfTwo(), candidates, [Asked()] * 200)


def test_a_key_keeps_its_engine_and_only_those_of_a_lost_one_move() -> None:
    candidates, asked = backends(1, 1, 1, 1), [Asked(key) for key in KEYS]
    before = served(ConsistentHash(), candidates, asked)
    after = served(ConsistentHash(), candidates[1:], asked)
    moved = [old for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {candidates[0].id} and len(moved) == before.count(candidates[0].id)
    assert min(Counter(before).values()) > 0.8 * len(KEYS) / 4


def test_twice_the_weight_has_twice_the_keys() -> None:
    light, heavy = backends(1, 2)
    share = served(ConsistentHash(), [light, heavy], [Asked(key) for key in KEYS]).count(heavy.id) / len(KEYS)
    assert 0.62 < share < 0.71


def test_a_sticky_key_stays_until_its_engine_is_gone() -> None:
    policy, (first, second) = Sticky(), backends(1, 1)
    first.in_flight = 5
    assert served(policy, [first, second], [Asked("a")]) == [second.id]
    second.in_flight = 50
    assert served(policy, [first, second], [Asked("a"), Asked("b")]) == [second.id, first.id]
    assert served(policy, [first], [Asked("a")]) == [first.id]
    second.in_flight = 0
    assert served(policy, [first, second], [Asked("a")]) == [first.id]


def test_a_prompt_goes_where_its_beginning_is_cached_and_a_new_one_where_the_load_is_least() -> None:
    policy, (first, second) = CacheAware(), backends(1, 1)
    start = list(range(4 * BLOCK_TOKENS))
    first.in_flight = 1
    assert served(policy, [first, second], [prompt(*start)]) == [second.id]
    second.in_flight = 5
    assert served(policy, [first, second], [prompt(*start, 7, 8, 9), prompt(*range(900, 999))]) == [second.id, first.id]
    policy.forget(second.id)
    assert served(policy, [first, second], [prompt(*start)]) == [first.id]


def test_a_cached_beginning_does_not_outweigh_an_engine_that_is_far_too_busy() -> None:
    policy, (first, second) = CacheAware(), backends(1, 1)
    asked = prompt(*range(100))
    second.in_flight = 1
    assert served(policy, [first, second], [asked]) == [first.id]
    first.in_flight, second.in_flight = 60, 10
    assert served(policy, [first, second], [asked]) == [second.id]


def test_the_blocks_used_longest_ago_are_forgotten_and_none_outlives_those_before_it() -> None:
    policy, (only,) = CacheAware(blocks_kept=3), backends(1)
    older, newer = list(range(3 * BLOCK_TOKENS)), list(range(500, 500 + 2 * BLOCK_TOKENS))
    served(policy, [only], [prompt(*older), prompt(*newer)])
    assert [policy._cached(only, prompt_blocks(ids)) for ids in (older, newer)] == [1, 2]


@given(st.lists(st.integers(0, 3), max_size=200), st.lists(st.integers(0, 3), max_size=200))
def test_two_prompts_share_as_many_blocks_as_they_begin_alike(one: list[int], other: list[int]) -> None:
    alike = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    shared = [a == b for a, b in zip(prompt_blocks(one), prompt_blocks(other), strict=False)]
    assert shared[: alike // BLOCK_TOKENS] == [True] * (alike // BLOCK_TOKENS)
    assert not any(shared[alike // BLOCK_TOKENS :])


def test_an_unknown_policy_is_answered_with_the_nearest() -> None:
    with pytest.raises(LookupError, match="did you mean 'least_loaded'"):
        get_policy("least_load")


@pytest.mark.parametrize(
    ("demand", "version", "met"),
    [
        (Demand(), None, True),
        (Demand(exact="3-ab"), "3-ab", True),
        (Demand(exact="3-ab"), "3-ac", False),
        (Demand(least=3), "3-ab", True),
        (Demand(least=4), "3-ab", False),
        (Demand(least=4), "12-ab", True),
        (Demand(least=0), None, False),
        (Demand(least=0), "default", False),
    ],
)
def test_a_request_may_insist_on_weights(demand: Demand, version: str | None, met: bool) -> None:
    assert demand.met_by(version) is met


def test_headers_say_key_and_weights_and_nonsense_is_refused() -> None:
    found = asked_of([(b"x-smg-routing-key", b"k"), (b"x-milepost-min-weight-version", b"7")])
    assert (found.key, found.demand) == ("k", Demand(least=7))
    with pytest.raises(BadDemand, match="x-milepost-min-weight-version is 'new', it must be a number of steps"):
        asked_of([(b"x-milepost-min-weight-version", b"new")])


@pytest.mark.parametrize("weight", [0.0, -1.0, float("inf"), float("nan")])
def test_a_worker_needs_a_weight_above_zero(weight: float) -> None:
    with pytest.raises(BadWorkerUrl, match="weight .* must be more than 0"):
        BackendPool().add("http://h:1", weight)


def pool_of(count: int, version: str = "1-a") -> BackendPool:
    pool = BackendPool([f"http://h:{number}" for number in range(count)])
    for backend in pool.all():
        pool.answered(backend, version)
    return pool


async def holding(line: Line, order: list[Any], name: Any, asked: Asked | None = None) -> None:
    async with line.place(asked or Asked()):
        order.append(name)
        await asyncio.sleep(0.01)


def test_who_waits_for_a_place_is_served_in_the_order_of_coming_and_no_engine_has_too_much() -> None:
    async def all_of_them() -> tuple[list[int], int]:
        pool, order = pool_of(2), []
        line = Line(pool, LeastLoaded(), max_in_flight=2, seconds=10)
        running = [asyncio.create_task(holding(line, order, number)) for number in range(20)]
        most = 0
        while not all(task.done() for task in running):
            most = max(most, *(backend.in_flight for backend in pool.all()))
            await asyncio.sleep(0.001)
        return order, most

    order, most = asyncio.run(all_of_them())
    assert order == list(range(20)) and most == 2


def test_one_that_insists_on_other_weights_delays_nobody_behind_it() -> None:
    async def two_lines() -> list[str]:
        pool, order = pool_of(2), []
        new, _ = pool.all()
        pool.answered(new, "2-b")
        line = Line(pool, LeastLoaded(), max_in_flight=1, seconds=10)
        async with line.place(Asked(demand=Demand(least=2))):
            picky = asyncio.create_task(holding(line, order, "picky", Asked(demand=Demand(least=2))))
            await asyncio.sleep(0)
            await asyncio.gather(*(holding(line, order, name) for name in ("easy", "too")))
        await picky
        return order

    assert asyncio.run(two_lines()) == ["easy", "too", "picky"]


def test_a_line_ends_at_its_deadline_and_at_once_when_no_engine_is_left() -> None:
    async def endings() -> list[str]:
        pool = pool_of(1)
        (only,) = pool.all()
        line, found = Line(pool, LeastLoaded(), max_in_flight=1, seconds=0.05), []
        async with line.place(Asked()):
            with pytest.raises(WaitedTooLong, match="no worker had a free place within 0.05 s"):
                await holding(line, found, "late")
            waiting = asyncio.create_task(holding(line, found, "in vain"))
            await asyncio.sleep(0)
            pool.failed(only, "gone", at_once=True)
            with pytest.raises(NobodyServes):
                await waiting
        return [*found, f"{line.length} wait, {only.in_flight} in flight"]

    assert asyncio.run(endings()) == ["0 wait, 0 in flight"]


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=30), st.integers(1, 3))
def test_no_place_is_lost_whatever_leaves_the_line_and_when(moves: list[tuple[int, bool]], places: int) -> None:
    async def at_random() -> list[int]:
        pool, order = pool_of(2), []
        line = Line(pool, LeastTokens(), max_in_flight=places, seconds=5)
        tasks = []
        for pause, leaves in moves:
            tasks.append(asyncio.create_task(holding(line, order, 0, prompt(1, 2))))
            for _ in range(pause):
                await asyncio.sleep(0)
            if leaves:
                tasks[len(tasks) // 2].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return [line.length, *(value for one in pool.all() for value in (one.in_flight, one.tokens))]

    assert asyncio.run(at_random()) == [0] * 5


def test_an_engine_that_comes_back_serves_those_who_wait() -> None:
    async def comes_back() -> list[str]:
        pool, order = pool_of(2), []
        first, second = pool.all()
        pool.failed(second, "gone", at_once=True)
        line = Line(pool, LeastLoaded(), max_in_flight=1, seconds=5)
        async with line.place(Asked()) as backend:
            assert backend is first
            waiting = asyncio.create_task(holding(line, order, "waited"))
            await asyncio.sleep(0)
            pool.answered(second, "1-a")
            await waiting
        return order

    assert asyncio.run(comes_back()) == ["waited"]
