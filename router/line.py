"""Places at the engines, and the line of requests that wait for one: first come, first served."""

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from milepost.router.asked import Asked
from milepost.router.backends import Backend, BackendPool, State
from milepost.router.policies import Policy


class NobodyServes(LookupError):
    """No engine may serve the request, so there is nothing to wait for."""


class WaitedTooLong(TimeoutError):
    """All engines that may serve the request were full until its time in the line was over."""


@dataclass(eq=False)
class _Waiting:
    asked: Asked
    tried: Collection[str]
    place: "asyncio.Future[Backend]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Line:
    """Gives out places: at most `max_in_flight` at each engine, any number when that is 0.

    A place that becomes free goes to the request that has waited longest of those that its engine may serve, so one
    that insists on certain weights delays nobody behind it.
    """

    def __init__(self, pool: BackendPool, policy: Policy, *, max_in_flight: int, seconds: float) -> None:
        self._pool, self._policy = pool, policy
        self._max_in_flight, self._seconds = max_in_flight, seconds
        self._waiting: dict[_Waiting, None] = {}  # in the order in which they came
        pool.watch(self._changed)

    @property
    def length(self) -> int:
        return len(self._waiting)

    @asynccontextmanager
    async def place(self, asked: Asked, tried: Collection[str] = ()) -> AsyncIterator[Backend]:
        """An engine outside `tried`, on which the request counts as long as this lasts.

        NobodyServes when none may serve it; WaitedTooLong after `seconds` in the line.
        """
        backend = self._choose(asked, tried) or await self._wait(asked, tried)
        try:
            yield backend
        finally:
            self._leave(backend, asked)

    def _choose(self, asked: Asked, tried: Collection[str]) -> Backend | None:
        """An engine with a free place, which is taken; None when all that may serve are full."""
        able = self._pool.rotation(asked.demand, tried=tried)
        if not able:
            raise NobodyServes
        free = [backend for backend in able if self._has_room(backend)]
        return self._take(free, asked) if free else None

    def _take(self, free: Sequence[Backend], asked: Asked) -> Backend:
        backend = self._policy.choose(free, asked)
        self._pool.take(backend, self._tokens(asked))
        return backend

    def _leave(self, backend: Backend, asked: Asked) -> None:
        self._pool.give_back(backend, self._tokens(asked))
        self._hand_on(backend)

    async def _wait(self, asked: Asked, tried: Collection[str]) -> Backend:
        waiting = _Waiting(asked, tried)
        self._waiting[waiting] = None
        try:
            async with asyncio.timeout(self._seconds):
                return await waiting.place
        except BaseException as error:
            place = waiting.place
            if place.done() and not place.cancelled() and place.exception() is None:
                self._leave(place.result(), asked)  # it came in the moment in which nobody wanted it any more
            if isinstance(error, TimeoutError):
                raise WaitedTooLong(f"no worker had a free place within {self._seconds:g} s") from None
            raise
        finally:
            self._waiting.pop(waiting, None)

    def _hand_on(self, backend: Backend) -> None:
        """Give the free places of `backend` to those who wait."""
        while self._waiting and self._has_room(backend):
            next_one = next((one for one in self._waiting if self._may_serve(backend, one)), None)
            if next_one is None:
                return
            del self._waiting[next_one]
            next_one.place.set_result(self._take([backend], next_one.asked))

    def _may_serve(self, backend: Backend, waiting: _Waiting) -> bool:
        able = self._pool.rotation(waiting.asked.demand, tried=waiting.tried)
        return not waiting.place.done() and backend in able

    def _changed(self, backend: Backend, before: State) -> None:
        """An engine came, left, or has other weights: what it cached is gone, and some who wait may wait in vain."""
        self._policy.forget(backend.id)
        if backend.state == "healthy":
            self._hand_on(backend)
            return
        for waiting in list(self._waiting):
            if not self._pool.rotation(waiting.asked.demand, tried=waiting.tried) and not waiting.place.done():
                del self._waiting[waiting]
                waiting.place.set_exception(NobodyServes())

    def _has_room(self, backend: Backend) -> bool:
        return not self._max_in_flight or backend.in_flight < self._max_in_flight

    def _tokens(self, asked: Asked) -> int:
        return asked.tokens if self._policy.reads_prompt else 0
