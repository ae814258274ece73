"""A real router over two engines: what a run tells it, and what it is told."""

import asyncio

import pytest

from milepost.engines.protocols import WeightVersion
from milepost.router.app import build_app
from milepost.router.control import add_worker, remove_worker, rotation, set_weight_version

from .test_router import TOKEN, Engine, serve

pytestmark = pytest.mark.slow


def test_only_engines_with_the_current_weights_serve() -> None:
    with serve(Engine("a", "1-aa").app()) as old, serve(Engine("b", "2-bb").app()) as new:
        with serve(build_app([old, new])) as url:
            assert sorted(asyncio.run(rotation(url)).serving) == sorted([old, new])
            found = asyncio.run(set_weight_version(url, WeightVersion(2, "bb")))
            assert (found.version, found.serving) == (WeightVersion(2, "bb"), [new])
            assert {worker.url: worker.state for worker in found.workers} == {old: "stale", new: "healthy"}
            assert sorted(asyncio.run(set_weight_version(url, None)).serving) == sorted([old, new])


def test_an_engine_is_taken_in_and_dismissed_while_the_router_runs() -> None:
    with serve(Engine("a", "1-aa").app()) as engine, serve(build_app([], token=TOKEN)) as url:
        worker = asyncio.run(add_worker(url, engine, token=TOKEN))
        assert (worker.url, worker.state) == (engine, "healthy")
        asyncio.run(remove_worker(url, worker, token=TOKEN))
        assert asyncio.run(rotation(url, token=TOKEN)).workers == []


def test_a_router_that_is_not_there_is_one_sentence() -> None:
    with pytest.raises(ConnectionError, match=r"the router at http://127\.0\.0\.1:9/weight_version did not answer"):
        asyncio.run(set_weight_version("http://127.0.0.1:9", WeightVersion(1, "bb")))


def test_a_router_that_refuses_says_why() -> None:
    with serve(build_app([], token=TOKEN)) as url, pytest.raises(ConnectionError, match="the router refused GET"):
        asyncio.run(rotation(url))
